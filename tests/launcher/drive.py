"""Runs a Supervisor over stand-ins, as the launcher does over services: `drive.py FOLDER < specs.json`.

The input is a list of [instance, arguments of stand_in.py]; ports are taken from the arguments.
"""

import json
import os
import sys
from pathlib import Path

from services.launcher.processes import Spec, http_probe
from services.launcher.run_files import RunFiles
from services.launcher.supervisor import Supervisor, say
from shared.errors import ConfigError


def main() -> int:
    stand_in = str(Path(__file__).with_name("stand_in.py"))
    specs = [
        Spec(
            instance=instance,
            role=instance.partition("-")[0],
            argv=(sys.executable, stand_in, *arguments),
            env=dict(os.environ),
            port=int(arguments[0]),
            probe=http_probe("127.0.0.1", int(arguments[0])),
        )
        for instance, arguments in json.load(sys.stdin)
    ]
    files = RunFiles(Path(sys.argv[1]))
    try:
        ready = lambda: print("ready", flush=True)  # noqa: E731
        return Supervisor(specs, files, ready, drain_timeout_s=float(sys.argv[2]), fatal_codes=frozenset({2})).run()
    finally:
        files.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as e:
        say(str(e))
        sys.exit(2)
