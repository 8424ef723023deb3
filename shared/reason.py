"""Why a start failed, told to whoever started the process, besides the log.

The launcher's last line repeats it, as other services may log on behind it. Owns the variable that names the file.
"""

import contextlib
import os
from typing import Final

REASON_FILE: Final = "MILLRACE_REASON_FILE"
"""Variable with the path of a file that is there already; not a setting, as only the launcher gives it."""
MAX_BYTES: Final = 2000


def tell_reason(reason: str) -> None:
    """Leave the reason with the launcher; does nothing in a process that none has started."""
    path = os.environ.get(REASON_FILE)
    if not path:
        return
    with contextlib.suppress(OSError):  # the launcher is gone; the log has it all the same
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, reason.encode()[:MAX_BYTES])
        finally:
            os.close(fd)
