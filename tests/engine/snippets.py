"""Snippets of Python in processes of their own: Triton's interpreter must be chosen before Triton is first imported."""

import os
import subprocess
import sys
import textwrap


def environment(*, interpreted: bool) -> dict[str, str]:
    """With Triton's interpreter, or without it whatever the tests themselves run under."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**env, "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if interpreted else {})}


def run_snippet(
    code: str, *args: object, setup: str = "", interpreted: bool = True, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a snippet behind a setup; it must exit 0."""
    run = subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(code), *map(str, args)],
        env=environment(interpreted=interpreted),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run
