"""A rank above 0 that comes to harm while it starts; `BROKEN` names a function that its start calls, and the harm.

Run as a module it is `follower`; tests have rank 0 start it.
"""

import os
import signal
import sys
import threading
from typing import Any

from services.scheduler.engine import follower
from services.scheduler.engine.parallel.ending import end_process
from shared.errors import ConfigError


def fail(harm: str, *_: Any, **__: Any) -> None:
    """Come to harm."""
    if harm == "refuse":
        raise ConfigError("there is no room here")
    if harm == "break":
        raise ValueError("a fault of its own")
    if harm == "die":
        sys.stderr.write("dying\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # hang


if __name__ == "__main__":
    name, _, harm = os.environ["BROKEN"].partition(":")
    setattr(follower, name, lambda *args, **kwargs: fail(harm))
    end_process(follower.main(int(sys.argv[1])))
