"""`python -m services.scheduler`: one scheduler from its `MILLRACE_*` settings."""

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.runtime import leave, main

if __name__ == "__main__":
    leave(main("scheduler", SchedulerSettings, SchedulerService, watch=("api",), stuck_after_s=lambda s: s.stuck_after))
