"""A rank above 0 that comes to harm while it starts; `BROKEN` names a function that its start calls, and the harm.

`GATE`, if there is one, names a file that is there when the harm may come.

Run as a module it is `follower`; tests have rank 0 start it.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from services.scheduler.engine import follower
from services.scheduler.engine.parallel.ending import end_process
from shared.errors import ConfigError
from tests.waiting import eventually


def fail(harm: str, *_: Any, **__: Any) -> None:
    """Come to harm."""
    if gate := os.environ.get("GATE"):
        eventually(Path(gate).exists, "the gate is open")
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
