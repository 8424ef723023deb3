"""Conversations in a terminal, through the services of a stack and through services of the shell's own."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import ROOT, Stack
from tests.waiting import eventually, heed_all_signals

LIMIT_S = 60.0


class Terminal:
    """A shell behind a terminal of its own."""

    def __init__(self, *flags: str) -> None:
        self.master, slave = pty.openpty()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher", "shell", *flags],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=clean | {"TERM": "dumb"},
            preexec_fn=lambda: (heed_all_signals(), os.setsid(), os.close(os.open(os.ttyname(slave), os.O_RDWR))),
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str) -> str:
        """Wait for a text; give what stood before it."""
        until = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert select.select([self.master], [], [], max(0.0, until - time.monotonic()))[0], self.seen
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def run_dir(stack: Stack) -> str:
    return str(stack.folder / "run")


def test_ctrl_c_stops_the_answer_and_frees_the_slot(fake: Stack) -> None:
    terminal = Terminal("--run-dir", run_dir(fake), "--engine", "fake")
    try:
        terminal.expect("Ctrl-D ends.")
        terminal.expect("> ")
        terminal.type("tell me everything\r")
        eventually(lambda: fake.running() == 1, "the answer runs")
        terminal.type("\x03")
        terminal.expect("[stopped]")
        eventually(lambda: fake.running() == 0, "the slot is free")
        terminal.type("/set max_tokens 5\r")
        terminal.expect("max_tokens 5\r\n")
        terminal.type("again\r")
        terminal.expect("\n> ")
        terminal.type("\x03")  # at the prompt it does nothing
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(LIMIT_S) == 0
    finally:
        terminal.close()


def shell(folder: str, lines: list[str], *flags: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "services.launcher", "shell", "--run-dir", folder, *flags],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")} | (env or {}),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_remembers_until_it_is_reset(real: Stack) -> None:
    first, second = "What is the capital of France?", "Say it again."
    lines = ["/set temperature 0", "/set max_tokens 12", first, second, "/reset", first]
    answers = shell(run_dir(real), lines).split("> ")[3:6]
    texts = [answer.strip() for answer in answers]
    messages = [{"role": "user", "content": first}]
    expected = real.chat(messages=messages, max_tokens=12)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": second}]
    remembered = real.chat(messages=messages, max_tokens=12)["choices"][0]["message"]["content"]
    assert texts[0] == expected.strip()
    assert texts[1] == remembered.strip()


def test_services_of_its_own_end_with_it(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    text = shell(str(tmp_path / "run"), ["/set max_tokens 8", "hello"], "--engine", "fake")
    assert text.startswith("Talking to ")
    assert len(text.split("> ")[2].strip()) > 0
    assert not (tmp_path / "run" / "pids.json").exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("line", ["/set temperature 9", "/nonsense"])
def test_a_mistake_is_said_and_the_conversation_goes_on(fake: Stack, line: str) -> None:
    text = shell(run_dir(fake), [line, "/show"])
    assert "error: " in text and "nothing is set" in text
