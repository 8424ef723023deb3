"""What a person may have meant: names of flags and variables that are not there, and values that will not do.

Owns the words of these hints and the names that people know from vLLM (docs/from-vllm.md has them all). Knows the
names of the settings, not what they do.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shared.settings import ENV_PREFIX

_FROM_VLLM: Final[Mapping[str, str]] = {
    "--max-model-len": "--max-seq-len",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--max-prefill-tokens",
    "--gpu-memory-utilization": "--memory-ratio",
    "--revision": "--model-revision",
    "--data-parallel-size": "--schedulers",
    "--api-server-count": "--api-workers",
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--no-enable-prefix-caching": "--cache naive",
    "--enforce-eager": "--cuda-graph-max-bs 0",
    "--allowed-origins": "--cors-origins",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--shutdown-timeout": "--drain-timeout",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--uvicorn-log-level": "--log-level",
}
_ALWAYS_SO: Final = frozenset(
    ("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling", "--enable-auto-tool-choice")
)
_NEAR: Final = 0.7
"""How alike two names are, from 0 to 1, of which one may be a slip of the other."""
_COMPOSE: Final = frozenset((f"{ENV_PREFIX}VERSION", f"{ENV_PREFIX}STOP_GRACE"))
"""Variables of the container files, which no service reads."""


def of_flags(words: Sequence[str], flags: Iterable[str]) -> str:
    """Say what may be meant by the words of a command line that no flag is called.

    Args:
        words: those that were left over; values among them are passed over.
        flags: all that there are.
    """
    known = list(flags)
    hints = []
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--"):
            continue
        near = _near(name, known)
        if name in _FROM_VLLM:
            hints.append(f"vLLM's {name} is {_FROM_VLLM[name]} here")
        elif name in _ALWAYS_SO:
            hints.append(f"vLLM's {name} needs no flag here: it is always so")
        elif near:
            hints.append(f"did you mean {near}?")
    return "; ".join(hints)


def of_variables(environ: Iterable[str], fields: Iterable[str]) -> list[str]:
    """Warn of each variable that looks like a setting but is none."""
    known = {f"{ENV_PREFIX}{field.upper()}" for field in fields}
    warnings = []
    for name in sorted({name for name in environ if name.startswith(ENV_PREFIX)} - known - _COMPOSE):
        near = _near(name, known)
        meant = f"; did you mean {near}?" if near else ""
        warnings.append(f"{name} is not a setting, and is ignored{meant}")
    return warnings


def _near(name: str, known: Iterable[str]) -> str | None:
    """Find the name that was meant, if one is really near. What all begin with counts for nothing."""
    stems = {_stem(each): each for each in known}
    near = difflib.get_close_matches(_stem(name), stems, 1, _NEAR)
    return stems[near[0]] if near else None


def _stem(name: str) -> str:
    return name.removeprefix("--").removeprefix(ENV_PREFIX)


def with_flags(message: str, variables: Iterable[str], argv: Sequence[str]) -> str:
    """Name bad values by the flags that they were given with, besides their variables.

    Args:
        message: of a ConfigError; names variables.
        variables: that were given as flags.
        argv: the command line.
    """
    typed = {word.partition("=")[0] for word in argv}
    aliases = {"--tensor-parallel-size": "--tp", "--api-keys": "--api-key", "--kernel-cache-dir": "--cache-dir"}
    names = {}
    for variable in variables:
        flag = f"--{variable.removeprefix(ENV_PREFIX).lower().replace('_', '-')}"
        shown = flag if flag in typed else aliases.get(flag, flag)
        names[variable] = f"{shown} ({variable})"
    return renamed(message, names)


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Call settings as in `names` (variable -> name).

    A ConfigError names a setting at the begin of a clause: `MILLRACE_DTYPE: ...`, or, where an engine refuses it,
    `dtype 'float16' ...`.
    """
    for variable, name in names.items():
        words = variable.removeprefix(ENV_PREFIX).lower().replace("_", "[_ ]")
        pattern = rf"(^|[:;] )(?:{variable}(?=:)|{words}(?= (?:'|is |-?\d)))"
        message = re.sub(pattern, lambda found, name=name: found[1] + name, message, count=1)  # type: ignore[misc]
    return message
