"""`python -m services.scheduler`: one scheduler from its `MILLRACE_*` settings."""

import sys
from typing import Final

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.runtime import main

STUCK_AFTER_S: Final = 300.0
"""A step on a slow processor may take long; one that takes longer than this never ends."""

if __name__ == "__main__":
    sys.exit(main("scheduler", SchedulerSettings, SchedulerService, watch=("api",), stuck_after_s=STUCK_AFTER_S))
