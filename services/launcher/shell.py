"""`shell`: a conversation in the terminal, through the services but without the api and without HTTP.

It joins the services of a launcher that runs in the same folder, or those of a given broker; otherwise it starts
services of its own, with one request slot. Owns the conversation, its parameters and the terminal; what travels
is `replica.py`'s business.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from services.launcher.joining import running_broker
from services.launcher.processes import before_exec
from services.launcher.replica import Replica
from services.launcher.settings import LauncherSettings
from services.launcher.supervisor import say
from shared import sampling
from shared.errors import MillraceError, Unavailable
from shared.sampling import SamplingParams

_READY_S: Final = 120.0
_STOP_S: Final = 6.0
_SETTABLE: Final[dict[str, tuple[type, tuple[float, float]]]] = {
    **{name: (float, bounds) for name, bounds in sampling.BOUNDS.items() if name != "logit_bias"},
    "max_tokens": (int, (1, 1 << 20)),
    "min_tokens": (int, (0, 1 << 20)),
    "top_k": (int, (-1, 1 << 20)),
    "seed": (int, (0, sampling.SEED_MAX)),
}
_HELP: Final = """\
/set NAME VALUE   set a parameter: {names}; stop takes a text, and `none` unsets
/show             show what is set
/system TEXT      begin anew with a system message
/reset            forget the conversation
/help             this
/exit             end, as Ctrl-D does; Ctrl-C stops an answer"""


class UnknownCommand(MillraceError):
    """What was typed is no command, or its values make no sense."""


@dataclass(slots=True)
class Conversation:
    """What was said, and how answers are drawn.

    Attributes:
        messages: OpenAI's.
        settings: parameter -> value, of those that were set.
        stop: text that ends an answer, or empty.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    stop: str = ""

    def params(self) -> SamplingParams:
        """Give what was set in the words of the wire."""
        return msgspec.structs.replace(SamplingParams(), **self.settings)

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash, and give what is to be printed.

        Raises:
            UnknownCommand: it cannot be obeyed; says why.
        """
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        match name:
            case "set":
                return self._set(*rest.partition(" ")[::2])
            case "show":
                values = {**self.settings, **({"stop": self.stop} if self.stop else {})}
                return "\n".join(f"{key} {value}" for key, value in sorted(values.items())) or "nothing is set"
            case "reset":
                self.messages = [message for message in self.messages if message["role"] == "system"]
                return "the conversation is forgotten"
            case "system":
                self.messages = [{"role": "system", "content": rest}] if rest else []
                return "the conversation begins anew"
            case "help":
                return _HELP.format(names=", ".join([*_SETTABLE, "stop"]))
        raise UnknownCommand(f"no command /{name}; /help lists them")

    def _set(self, name: str, text: str) -> str:
        text = text.strip()
        if name == "stop":
            self.stop = "" if text == "none" else text
            return f"stop {self.stop or 'none'}"
        if name not in _SETTABLE:
            raise UnknownCommand(f"no parameter {name!r}; there are {', '.join([*_SETTABLE, 'stop'])}")
        if text == "none":
            self.settings.pop(name, None)
            return f"{name} none"
        kind, (low, high) = _SETTABLE[name]
        try:
            value = kind(text)
        except ValueError:
            raise UnknownCommand(f"{name}: {text!r} is no {'number' if kind is float else 'integer'}") from None
        if not low <= value <= high:
            raise UnknownCommand(f"{name}: from {low:g} to {high:g} is allowed")
        self.settings[name] = value
        return f"{name} {value}"


class Shell:
    """The loop of a conversation.

    Args:
        replica: what answers; joined already.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._conversation = Conversation()
        self._stopped = False

    def run(self) -> int:
        """Talk until the input ends; give the exit code."""
        say = self._conversation
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            if line.strip() in ("/exit", "/quit"):
                break
            try:
                if line.startswith("/"):
                    print(say.command(line), flush=True)
                else:
                    self._answer(line)
            except MillraceError as e:
                print(f"error: {e}", flush=True)
        return 0

    def _answer(self, line: str) -> None:
        """Print an answer as it comes. Stopped or whole it becomes part of the conversation; one that failed not."""
        talk, text = self._conversation, ""
        question = {"role": "user", "content": line}
        stop = [talk.stop] if talk.stop else []
        self._stopped = False
        try:
            with _interrupts(self._stop):
                asked = [*talk.messages, question]
                for delta in self._replica.ask(asked, talk.params(), stop=stop, wants_stop=lambda: self._stopped):
                    text += delta.text
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        finally:
            print("\n[stopped]" if self._stopped else "", flush=True)
        talk.messages += [question, {"role": "assistant", "content": text}]

    def _stop(self) -> None:
        self._stopped = True


def run(settings: LauncherSettings, *, joins: bool, any_model: bool, flags: list[str]) -> int:
    """Talk in the terminal; give the exit code.

    Args:
        settings: that reach the broker; the launcher's own when it joins nobody.
        joins: whether there are services already.
        any_model: talk to the one model that these serve, as none was named.
        flags: for the launcher of services, when there are none.

    Raises:
        MillraceError: the services do not come up.
    """
    with contextlib.nullcontext(settings) if joins else _own_services(settings, flags) as reachable:
        replica = Replica(reachable, any_model=any_model)
        try:
            if joins:
                say(f"joining the services at {replica.url}")
            replica.start(_READY_S)
            print(f"Talking to {replica.model}. /help lists the commands; Ctrl-D ends.", flush=True)
            return Shell(replica).run()
        finally:
            replica.close()


@contextlib.contextmanager
def _own_services(settings: LauncherSettings, flags: list[str]) -> Iterator[LauncherSettings]:
    """Run tokenizer, scheduler and detokenizer, and a broker, as long as the block lasts."""
    environ = {"MILLRACE_MAX_RUNNING_REQUESTS": "1", **os.environ}
    me = os.getpid()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "services.launcher", "serve", *flags, "--apis", "0"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in this terminal stops an answer, not the services
        preexec_fn=lambda: before_exec(me),
    )
    try:
        assert launcher.stdout is not None
        if not select.select([launcher.stdout], [], [], _READY_S)[0] or not launcher.stdout.readline():
            raise Unavailable("the services did not start; see their last lines above")
        yield running_broker(settings)
    finally:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _read_line() -> str | None:
    """Read a line, with history and editing where there is a terminal; None at the end of the input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - what `input` edits with, once it is there
    while True:
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            print(flush=True)


@contextlib.contextmanager
def _interrupts(wish: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C be a wish instead of an exception."""
    before = signal.signal(signal.SIGINT, lambda signum, frame: wish())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
