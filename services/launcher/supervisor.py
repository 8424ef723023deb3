"""Keeps a set of instances running: starts them all at once, tells when they serve, revives, stops in order.

Owns the launcher's signals and its only loop. It is single-threaded and waits in one place (`_pause`), for a
signal or the time of the next look. Knows nothing of models, flags or ports beyond what a Spec says.
"""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from services.launcher.processes import Child, Spec, describe_exit
from services.launcher.run_files import RunFiles
from shared.errors import ConfigError

STOP_ORDER: Final = ("api", "tokenizer", "scheduler", "detokenizer", "redis")
"""Against the stream: first nobody asks any more, then nobody produces, then nobody carries."""

_STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_LOOK_S: Final = 0.1
_WATCH_S: Final = 1.0
_TELL_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0
"""After the drain time a service tells its clients that it is over; a second signal before that would cut them."""
_GRACE_S: Final = 4.0
"""Seconds after the drain time at which a service is killed."""
_QUICK_STOP_S: Final = {"api": 1.2, "tokenizer": 0.4, "scheduler": 1.5, "detokenizer": 0.4, "redis": 0.7}
"""Seconds each stage may take after a Ctrl-C, besides what the stages before it have left over; half of that passes
before the second signal. All: under 5 s."""
_ECHO_S: Final = 1.0
"""A signal this soon after the first is the same wish: `timeout`, for one, sends it to a process and to its group."""
_MAX_FALSE_STARTS: Final = 3
EXIT_BAD_START: Final = 1


class Supervisor:
    """Runs instances until a stop signal."""

    def __init__(
        self,
        specs: Sequence[Spec],
        files: RunFiles,
        on_ready: Callable[[], None],
        drain_timeout_s: float,
        fatal_codes: frozenset[int] = frozenset(),
        on_death: Callable[[str, str], bool] = lambda role, birth: False,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            specs: what to run.
            files: where process ids and ports are told; stays the caller's to close.
            on_ready: called once, when all instances have said that they serve.
            drain_timeout_s: how long a service may finish its work after SIGTERM to the launcher.
            fatal_codes: exit codes that no restart will cure (a bad setting); before the first readiness they
                stop everything.
            on_death: called with role and birth mark of an instance that has ended unasked, and all its processes with
                it; says whether others had better look at once who lives.
        """
        self._children = [Child(spec) for spec in specs]
        self._files = files
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._fatal_codes = fatal_codes
        self._on_death = on_death
        # nohup's wish is kept. A shell's, which ignores SIGINT for what runs in its background, is not: whoever
        # sends one means it.
        self._stop_signals = set(_STOP_SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self._stop_signals.remove(signal.SIGHUP)
        self._announced = False
        self._hopeless = ""
        self._is_misset = False
        self._told_to_stop_s = 0.0
        self._progress = Progress()

    def run(self) -> int:
        """Serve until told to stop; give the exit code (0: everything ended by itself).

        Raises:
            ConfigError: an instance ended with one of the fatal codes before it ever served; says why. All have ended.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._stop_signals, signal.SIGCHLD})
        try:
            for child in self._children:
                self._launch(child)
            while True:
                stop = self._pause(self._wait_s())
                if stop is not None:
                    self._told_to_stop_s = time.monotonic()
                    self._progress.clear()
                    say(f"{stop.name}: stopping")
                    return self._stop(quick=stop == signal.SIGINT)
                if not self._revive():
                    self._stop(quick=True)
                    if self._is_misset:
                        raise ConfigError(self._hopeless)
                    say(self._hopeless)
                    return EXIT_BAD_START
                self._look()
        finally:
            for child in self._children:
                child.kill()

    def _launch(self, child: Child) -> None:
        child.launch()
        self._tell()

    def _tell(self) -> None:
        """Rewrite the run files."""
        self._files.write(
            {name: pid for c in self._children for name, pid in c.pids().items()},
            {c.spec.instance: c.spec.port for c in self._children},
        )

    def _wait_s(self) -> float:
        """Say how long nothing needs to be looked at."""
        if not all(child.ready for child in self._children):
            return _LOOK_S
        return _WATCH_S

    def _pause(self, timeout_s: float) -> signal.Signals | None:
        """Wait for a signal; give it if it asks to stop."""
        info = signal.sigtimedwait({*self._stop_signals, signal.SIGCHLD}, timeout_s)
        if info is None or info.si_signo == signal.SIGCHLD:
            return None
        return signal.Signals(info.si_signo)

    def _revive(self) -> bool:
        """Notice who ended and start again whose time has come; False if that is hopeless."""
        now = time.monotonic()
        for child in self._children:
            status = child.poll()
            if status is not None:
                self._progress.clear()
                if self._is_hopeless(child, status):
                    return False
                self._tell()
                self._mourn(child)
            if child.due_s is not None and child.due_s <= now:
                self._launch(child)
        return True

    def _mourn(self, dead: Child) -> None:
        """Tell of a death before anybody has to notice it, and wake those who take over."""
        if self._on_death(dead.spec.role, dead.birth):
            for child in self._children:
                child.signal(signal.SIGUSR2)

    def _is_hopeless(self, child: Child, status: int) -> bool:
        """Judge an ended child: one that never served and cannot stops the start."""
        name, how = child.spec.instance, describe_exit(status)
        if not child.was_ready and (status in self._fatal_codes or child.failures >= _MAX_FALSE_STARTS):
            reason = child.reason()
            say(f"{name} cannot start ({how}); see its last lines above")
            self._hopeless = f"the start failed: {name}: {reason or how}"
            self._is_misset = status in self._fatal_codes
            return True
        say(f"{name} ended ({how}); starting it again")
        return False

    def _look(self) -> None:
        """Ask those that do not serve yet; announce the whole once."""
        for child in self._children:
            if signal.sigpending() & self._stop_signals:
                return
            if not child.ready and child.probe():
                if child.spec.ranks > 1:
                    self._tell()
                if self._announced:
                    say(f"{child.spec.instance} is ready again")
        waiting = [c for c in self._children if not c.ready]
        if self._announced:
            return
        if waiting:
            self._progress.show(", ".join(f"{c.spec.instance} ({c.waiting_for})" for c in waiting))
        else:
            self._announced = True
            self._progress.clear()
            self._on_ready()

    def _stop(self, quick: bool) -> int:
        """End every stage of STOP_ORDER in turn; give 0 if nobody had to be killed."""
        clean, spare_s = True, 0.0
        for role in STOP_ORDER:
            stage = [c for c in self._children if c.spec.role == role]
            began_s = time.monotonic()
            limit_s = _QUICK_STOP_S[role] + spare_s if quick else self._drain_timeout_s + _GRACE_S
            insist_s = limit_s / 2 if quick else self._drain_timeout_s + _LAST_WORDS_S
            for child in stage:
                child.signal(signal.SIGTERM)
            was_quick = quick
            ended, quick = self._await_end(stage, insist_s, limit_s, quick)
            clean = clean and ended
            spare_s = max(0.0, limit_s - (time.monotonic() - began_s)) if was_quick else 0.0
        return 0 if clean else 1

    def _await_end(self, stage: list[Child], insist_s: float, limit_s: float, quick: bool) -> tuple[bool, bool]:
        """Wait for a stage to end; at `insist_s` signal again, at `limit_s` kill.

        Another stop signal makes this stage and all that follow quick ones. Gives (ended by themselves, quick).
        """
        started_s = time.monotonic()
        insisted = False
        while alive := [c for c in stage if c.poll() is None and c.pid is not None]:
            passed_s = time.monotonic() - started_s
            if passed_s >= limit_s:
                for child in alive:
                    say(f"{child.spec.instance} did not end in {limit_s:.1f} s; killing it")
                    child.kill()
                self._tell()
                return False, quick
            if passed_s >= insist_s and not insisted:
                insisted = True
                for child in alive:
                    child.signal(signal.SIGTERM)
            if self._pause(0.02) is not None and time.monotonic() - self._told_to_stop_s > _ECHO_S:
                quick = True
                insist_s = min(insist_s, passed_s)
                limit_s = min(limit_s, passed_s + _QUICK_STOP_S[alive[0].spec.role] / 2)
        self._tell()
        return True, quick


class Progress:
    """What is waited for: one line that rewrites itself on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._told_s = self._started_s
        self._shown = ""

    def show(self, text: str) -> None:
        """Tell what is waited for; written anew only where it has changed, or a second has passed."""
        now_s = time.monotonic()
        if self._is_terminal:
            line = f"[{int(now_s - self._started_s):3d} s] {text}"[: shutil.get_terminal_size().columns - 1]
            if line != self._shown:
                self._shown = line
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
        elif now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            say(f"waiting for {text}")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


def say(text: str) -> None:
    """Tell the person at the terminal something that is not a result."""
    sys.stderr.write(f"millrace: {text}\n")
    sys.stderr.flush()
