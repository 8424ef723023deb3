"""How a process ends whose GPU may wait for a rank that is gone.

Whoever asks such a device for anything waits for ever, and so do the destructors of what lies there and what a library
does when the interpreter ends. So nothing is asked of it. A scheduler leaves in its own way (`shared.runtime.leave`);
this is for what ends before, and for programs that hold an engine themselves.
"""

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import Final

EXIT_FAULT: Final = 1
EXIT_CONFIG: Final = 2
"""As of services: something cannot be served as set, and another try would end alike."""

_held: list[object] = []


def leave_device(status: int, *held: object) -> None:
    """See that this process, when it ends, does so at once and with a status.

    Args:
        status: of the process; the first call's counts.
        held: what is kept until then, so that nothing asks the device to free it. An error keeps all that its frames
            hold.
    """
    if not _held:
        atexit.register(end_process, status)
    _held.extend((status, *held))


def end_process(status: int) -> None:
    """End the process and ask the device for nothing. Any thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it, or it is closed
            stream.flush()
    os._exit(status)
