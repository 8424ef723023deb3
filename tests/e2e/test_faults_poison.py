"""What kills or stalls whoever touches it is given up after three tries and kept; nobody else suffers."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartRedis
from tests.e2e.faults.crowd import Crowd, check_whole, wait_begun
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stacks import ask_undisturbed, launched, stream_bodies
from tests.e2e.stack import ROOT, Json, Stack
from tests.waiting import eventually

CRASH, STALL, NAN = [1, 2, 3], [3, 2, 1], [2, 1, 3]
NUM_TOKENS = 120
MARKERS = (
    "--fake-crash-marker",
    "1,2,3",
    "--fake-stall-marker",
    "3,2,1",
    "--stuck-after",
    "2",
    "--fake-nan-marker",
    "2,1,3",
)
STEP = ("--fake-step-ms", "20", "--lease", "2")


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine that some prompts end and others stall; requests that are given up are kept."""
    with launched(tmp_path_factory.mktemp("fragile"), *STEP, *MARKERS, "--dead-letter-bodies") as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(fragile: Stack) -> dict[str, str]:
    return ask_undisturbed(fragile, 6, NUM_TOKENS)


def dead(stack: Stack, *words: str, url: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `launcher dead` on a stack's broker."""
    where = ["--redis-url", url] if url else ["--run-dir", str(stack.folder / "run")]
    command = [sys.executable, "-m", "services.launcher", "dead", *where, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def letters(stack: Stack, **options: Any) -> list[str]:
    """Give the ids of the dead letters."""
    listed = dead(stack, "list", **options)
    assert listed.returncode == 0, listed.stderr
    return [line.split()[0] for line in listed.stdout.splitlines()[:-1]]


def poison(stack: Stack, ids: list[int]) -> Json:
    return stack.complete_body(ids, max_tokens=5, ignore_eos=True, stream=True)


def ends_with(stack: Stack, code: str) -> int:
    return stack.log.read_text(errors="replace").count(f"scheduler-0 ended ({code})")


@pytest.mark.slow
@pytest.mark.parametrize("marker", [CRASH, STALL], ids=["crash", "stall"])
def test_poison_is_given_up_and_its_neighbours_go_on(
    fragile: Stack, undisturbed: dict[str, str], marker: list[int]
) -> None:
    """A step that never ends is ended by the watchdog, which says where it stood."""
    fragile.wait_ready()
    assert dead(fragile, "drop", "all").returncode in (0, 1)
    before = ends_with(fragile, "exit code 70")
    with Crowd() as crowd:
        neighbours = crowd.ask(fragile, stream_bodies(fragile, 6, NUM_TOKENS))
        wait_begun(neighbours)
        bad = crowd.ask(fragile, [poison(fragile, marker)])
        crowd.wait([*neighbours, *bad])
    check_whole(neighbours, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert bad[0].error is not None
    assert bad[0].error["code"] == "engine_crashed"
    assert not bad[0].text
    assert ends_with(fragile, "exit code 70") - before == 3
    stacks = fragile.log.read_text(errors="replace")
    assert marker is not STALL or ("the loop is stuck" in stacks and "in launch" in stacks)
    fragile.wait_ready()
    wait_quiet(fragile)
    (letter,) = letters(fragile)
    shown = dead(fragile, "show", letter).stdout
    assert '"reason": "poison"' in shown
    assert '"tries": 3' in shown
    assert '"prompt_tokens": 3' in shown
    assert dead(fragile, "show", "1-1").returncode == 1
    assert "dropped 1" in dead(fragile, "drop", letter).stdout
    assert letters(fragile) == []


@pytest.mark.slow
def test_a_request_without_numbers_fails_alone(fragile: Stack, undisturbed: dict[str, str]) -> None:
    fragile.wait_ready()
    pids = fragile.pids()
    with Crowd() as crowd:
        neighbours = crowd.ask(fragile, stream_bodies(fragile, 6, NUM_TOKENS))
        wait_begun(neighbours)
        bad = crowd.ask(fragile, [poison(fragile, NAN), {**poison(fragile, NAN), "stream": False}])
        crowd.wait([*neighbours, *bad])
    check_whole(neighbours, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert [(c.status, c.error["code"] if c.error else None) for c in bad] == [(500, "bad_logits")] * 2
    assert fragile.pids() == pids
    wait_quiet(fragile)


@pytest.mark.slow
def test_a_letter_is_sent_again_when_the_cause_is_gone(tmp_path: Path, start_redis: StartRedis) -> None:
    url = start_redis().url
    with launched(tmp_path / "bad", *STEP, *MARKERS, "--dead-letter-bodies", redis_url=url) as bad:
        answer = bad.client.post("/v1/completions", json={**poison(bad, CRASH), "stream": False})
        assert answer.status_code == 500
        (letter,) = letters(bad, url=url)
        assert bad.stop() == 0
    with launched(tmp_path / "good", *STEP, redis_url=url) as good:
        again = dead(good, "replay", letter, url=url)
        assert again.returncode == 0, again.stdout + again.stderr
        assert re.search(r"sent again as \w{32}: length after 5 tokens", again.stdout)
        assert letters(good, url=url) == []
        wait_quiet(good, ended_logs=True)


@pytest.mark.slow
def test_a_letter_without_its_request_says_so(tmp_path: Path) -> None:
    """Prompts are not kept unless told to."""
    with launched(tmp_path, *STEP, *MARKERS) as stack:
        assert stack.client.post("/v1/completions", json={**poison(stack, CRASH), "stream": False}).status_code == 500
        (letter,) = letters(stack)
        assert '"body": null' in dead(stack, "show", letter).stdout
        again = dead(stack, "replay", letter)
        assert again.returncode == 1
        assert "holds no request" in again.stdout
        assert letters(stack) == [letter]
        with stack.redis() as broker:
            assert broker.xlen("millrace:dead") == 1


@pytest.mark.slow
def test_rubbish_in_any_stream_harms_nobody(fragile: Stack, undisturbed: dict[str, str]) -> None:
    fragile.wait_ready()
    deep = b"\x91" * 10_000 + b"\xc0"
    rubbish: list[bytes] = [
        b"\x00\xff\x17",
        b"",
        b"\x07",
        b"\x93\x01\x02\x03",
        deep,
        b"\x92\xa4beat\xa1x",
        b"\x92\xa1q\xcb\x7f\xf8",
    ]
    pids = fragile.pids()
    with Crowd() as crowd, fragile.redis() as broker:
        running = crowd.ask(fragile, stream_bodies(fragile, 6, NUM_TOKENS))
        wait_begun(running)
        streams = [
            key for kind in ("tokenize", "generate", "tokens", "inbox") for key in broker.keys(f"millrace:{kind}:*")
        ]
        assert {key.split(":")[1] for key in streams} >= {"tokenize", "generate", "inbox"}
        streams += [f"millrace:tokens:{fragile.model}:{shard}" for shard in range(4)]
        for key in set(streams):
            for blob in rubbish:
                broker.xadd(key, {"m": blob})
                broker.xadd(key, {"m": blob, "u": b"nobody"})
            broker.xadd(key, {"other": "field"})
        crowd.wait(running)
    check_whole(running, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert fragile.complete("x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert fragile.pids() == pids
    eventually(lambda: total(fragile, "detokenizer", "millrace_dead_letters_total") > 0, "dead letters of steps")
    eventually(lambda: total(fragile, "tokenizer", "millrace_dead_letters_total") > 0, "dead letters of requests")
    wait_quiet(fragile)


@pytest.mark.slow
def test_a_signal_shows_where_every_service_stands(fragile: Stack) -> None:
    for instance in ("tokenizer-0", "scheduler-0", "detokenizer-0"):
        before = fragile.log.read_text(errors="replace").count("most recent call first")
        pid = fragile.pids()[instance]
        subprocess.run(["kill", f"-{signal.SIGUSR1.value}", str(pid)], check=True)
        eventually(
            lambda b=before: fragile.log.read_text(errors="replace").count("most recent call first") > b, "its stacks"
        )
        assert fragile.pids()[instance] == pid
