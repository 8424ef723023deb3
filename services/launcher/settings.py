"""The command line: every setting of every service is a flag of the same name, and nothing else is.

Flags are not listed here: they are made from the fields of the settings classes, with the help from their
docstrings, so a flag cannot exist without the setting behind it, nor the other way round. A flag becomes the
`MILLRACE_` variable of its field, which all services inherit.
"""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from pydantic import Field

from services.api.settings import ApiSettings
from services.detokenizer.settings import DetokenizerSettings
from services.launcher import hints
from services.scheduler.settings import SchedulerSettings
from services.tokenizer.settings import TokenizerSettings
from shared.keys import Role
from shared.settings import ENV_PREFIX, ServiceSettings


class LauncherSettings(ServiceSettings):
    """What the launcher alone decides: how many of each service, and where their traces go.

    Attributes:
        apis: api replicas, on PORT, PORT+1, ...; 0 leaves HTTP out.
        tokenizers: tokenizer instances.
        schedulers: engines; each loads the model.
        detokenizers: detokenizer instances.
        run_dir: folder of process ids, ports and the data of its own Redis.
    """

    apis: int = Field(default=1, ge=0, le=64)
    tokenizers: int = Field(default=1, ge=1, le=64)
    schedulers: int = Field(default=1, ge=1, le=64)
    detokenizers: int = Field(default=1, ge=1, le=64)
    run_dir: Path = Path(".run")


SERVICES: Final[Mapping[Role, type[ServiceSettings]]] = {
    "tokenizer": TokenizerSettings,
    "scheduler": SchedulerSettings,
    "detokenizer": DetokenizerSettings,
    "api": ApiSettings,
}
"""Settings class of each service, in the order of a request's way."""

_PER_INSTANCE: Final = frozenset({"name", "health_port", "health_port_strict"})
"""Fields that the launcher gives to each instance itself."""
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_parallel_size": ("--tp",),
    "api_keys": ("--api-key",),
    "kernel_cache_dir": ("--cache-dir",),
}
_DOC_FIELD: Final = re.compile(r"^\s{4}(\w+): (.*)$")
COMMANDS: Final = ("serve", "shell", "warmup", "dead")
ALL_SERVICES: Final = "all services"


class Flag(NamedTuple):
    """A setting as people see it."""

    owner: str
    annotation: Any
    text: str
    default: Any


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands. Flags that were not given do not appear in its result."""
    parser = argparse.ArgumentParser(
        prog="python -m services.launcher", description="Run Millrace without containers.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    _add_flags(
        commands.add_parser(
            "serve",
            help="run all services (what a call without a command does)",
            usage="%(prog)s [--flag value ...]",
            description="Run all services. Each flag is also a variable: --max-seq-len is MILLRACE_MAX_SEQ_LEN.",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
    )
    _add_flags(
        commands.add_parser(
            "shell",
            help="talk to the model in this terminal, without HTTP",
            usage="%(prog)s [--flag value ...]",
            description="Talk to the model. It joins services that run already, or starts its own with one request "
            "slot; the flags are those of `serve`.",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
    )
    _add_flags(
        commands.add_parser(
            "warmup",
            help="compile the kernels that a model needs on this machine's GPU",
            usage="%(prog)s [--model NAME] [--cache-dir PATH] [--flag value ...]",
            description="Compile every kernel that serving needs, into a folder with which a start needs no compiler. "
            "Give it the flags of `serve`: those of the scheduler shape kernels.",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
    )
    _add_dead(commands)
    return parser


def _add_flags(command: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
    command.set_defaults(parser=command)
    for name, flag in settings_fields().items():
        if name in _PER_INSTANCE:
            continue
        flags = (f"--{name.replace('_', '-')}", *_ALIASES.get(name, ()))
        group, text = _group(command, flag.owner), flag.text.replace("%", "%%")
        if flag.annotation is bool:
            group.add_argument(*flags, dest=name, action="store_const", const="true", help=text)
        else:
            group.add_argument(*flags, dest=name, metavar=_metavar(flag.annotation), help=text)


def _add_dead(commands: Any) -> None:
    """Add the command that looks after given-up requests."""
    dead = commands.add_parser("dead", help="requests and messages that were given up", allow_abbrev=False)
    dead.set_defaults(parser=dead)
    dead.add_argument("--redis-url", default=argparse.SUPPRESS, metavar="URL", help="the installation's broker")
    dead.add_argument("--redis-prefix", default=argparse.SUPPRESS, metavar="NAME", help="the installation's prefix")
    dead.add_argument("--run-dir", default=argparse.SUPPRESS, metavar="FOLDER", help="of the launcher that runs it")
    actions = dead.add_subparsers(dest="action", required=True, metavar="list | show | replay | drop")
    actions.add_parser("list", help="one line per letter")
    for name, text in (
        ("show", "everything about one letter"),
        ("replay", "send a request again, and drop the letter"),
        ("drop", "delete a letter"),
    ):
        actions.add_parser(name, help=text).add_argument("id", help="id from the list, or `all` to drop")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Read a command line: the namespace, and the flags as `MILLRACE_` variables.

    A call without a command serves. Ends the process, naming the flag, when one is unknown.
    """
    is_bare = not argv or argv[0] not in (*COMMANDS, "-h", "--help")
    args, unknown = build_parser().parse_known_args(["serve", *argv] if is_bare else argv)
    parser: argparse.ArgumentParser = args.parser
    del args.parser
    if unknown:
        hint = hints.of_flags(unknown, parser._option_string_actions)
        if is_bare and not argv[0].startswith("-"):
            hint = f"the commands are {', '.join(COMMANDS)}"
        parser.error(f"unknown: {' '.join(unknown)}" + (f"; {hint}" if hint else ""))
    given = {key: value for key, value in vars(args).items() if key not in ("command", "action", "id")}
    return args, {ENV_PREFIX + key.upper(): str(value) for key, value in given.items()}


def settings_fields() -> dict[str, Flag]:
    """Collect every field of every settings class, the launcher's own first, then along a request's way."""
    owners: list[tuple[str, type[ServiceSettings]]] = [("launcher", LauncherSettings), *SERVICES.items()]
    found: dict[str, Flag] = {}
    for owner, cls in owners:
        texts = _docs(cls)
        for name, info in cls.model_fields.items():
            shared = name in ServiceSettings.model_fields or (name in found and found[name].owner != owner)
            flag = Flag(ALL_SERVICES if shared else owner, info.annotation, texts.get(name, ""), info.default)
            found[name] = found[name]._replace(owner=flag.owner) if name in found else flag
    return found


def _docs(cls: type) -> dict[str, str]:
    """Read the `Attributes:` of a class and its bases: field -> text."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, found, body = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        name = ""
        for line in body.splitlines() if found else ():
            match = _DOC_FIELD.match(line)
            if match:
                name, texts[match.group(1)] = match.groups()
            elif name and line.strip():
                texts[name] += " " + line.strip()
    return texts


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
    """Give the parser's group of that title, made on first use."""
    return next((g for g in parser._action_groups if g.title == title), None) or parser.add_argument_group(title)


def _metavar(annotation: Any) -> str:
    """Show the choices of a literal, or the kind of value."""
    options = [o for part in (annotation, *get_args(annotation)) for o in get_args(part) if isinstance(o, str)]
    if options:
        return "|".join(dict.fromkeys(options))
    kinds = {int: "N", float: "X", Path: "PATH"}
    return next((kinds[t] for t in (annotation, *get_args(annotation)) if t in kinds), "VALUE")
