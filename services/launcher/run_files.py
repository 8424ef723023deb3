"""The folder `.run/`: who runs, where, and one launcher at a time.

`pids.json` and `ports.json` map instance to process id and port. They are replaced as a whole at every change,
so a reader never sees half a file, and removed at the end.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError


class RunFiles:
    """Owner of one run folder; holds its lock until `close`."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and take its lock.

        Raises:
            ConfigError: another launcher runs there, or the folder cannot be written.
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise ConfigError(f"MILLRACE_RUN_DIR: {folder}: {e.strerror}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock)
            raise ConfigError(
                f"MILLRACE_RUN_DIR: another launcher runs in {folder}; stop it, or give this one its own --run-dir"
            ) from e

    def write(self, pids: Mapping[str, int], ports: Mapping[str, int]) -> None:
        """Replace both files."""
        self._replace("pids.json", pids)
        self._replace("ports.json", ports)

    def close(self) -> None:
        """Remove the files and give the folder free."""
        for name in ("pids.json", "ports.json"):
            (self.folder / name).unlink(missing_ok=True)
        os.close(self._lock)

    def _replace(self, name: str, content: Mapping[str, int]) -> None:
        draft = self.folder / f".{name}.new"
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.replace(self.folder / name)


def read_ports(folder: Path) -> dict[str, int]:
    """Read where the instances of a running launcher are; empty when none runs there."""
    try:
        ports: dict[str, int] = json.loads((folder / "ports.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return ports
