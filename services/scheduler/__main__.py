"""`python -m services.scheduler`: one scheduler from its `MILLRACE_*` settings."""

import sys

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.runtime import main

if __name__ == "__main__":
    sys.exit(
        main("scheduler", SchedulerSettings, SchedulerService, watch=("api",), stuck_after_s=lambda s: s.stuck_after)
    )
