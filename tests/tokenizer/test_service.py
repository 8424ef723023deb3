import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.broker.connection import Broker
from shared.broker.control import look
from shared.messages import Heartbeat, decode
from shared.settings import RedisSettings
from tests.redis_keys import command
from tests.tokenizer.requests import MODEL, chat
from tests.tokenizer.rig import Rig
from tests.waiting import eventually


class Tokenizer:
    """One real tokenizer process."""

    def __init__(self, name: str, settings: RedisSettings, folder: Path, model: str) -> None:
        self._log = folder / f"{name}.log"
        env = os.environ | {
            "MILLRACE_REDIS_URL": settings.redis_url,
            "MILLRACE_REDIS_PREFIX": settings.redis_prefix,
            "MILLRACE_SERVED_MODEL_NAME": MODEL,
            "MILLRACE_MODEL": model,
            "MILLRACE_NAME": name,
            "MILLRACE_HEALTH_HOST": "127.0.0.1",
            "MILLRACE_HEALTH_PORT": "0",
            "MILLRACE_LOG_FORMAT": "json",
        }
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.tokenizer"], env=env, stdout=out, stderr=out
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


StartTokenizer = Callable[..., Tokenizer]


@pytest.fixture
def rig(broker: Broker) -> Iterator[Rig]:
    rig = Rig(broker)
    rig.keep_beating()
    yield rig
    rig.stop()


@pytest.fixture
def start(rig: Rig, redis_settings: RedisSettings, tmp_path: Path) -> Iterator[StartTokenizer]:
    started: list[Tokenizer] = []

    def start(name: str, model: str = "") -> Tokenizer:
        tokenizer = Tokenizer(name, redis_settings, tmp_path, model)
        started.append(tokenizer)
        eventually(
            lambda: tokenizer.process.poll() is not None or any(c.startswith(name) for c in rig.pending()),
            "the tokenizer reads the queue",
        )
        return tokenizer

    yield start
    for tokenizer in started:
        tokenizer.kill()


def test_the_embedded_model_counts_as_its_reference(rig: Rig, start: StartTokenizer) -> None:
    rig.engine("e1")
    start("tok-a")
    sent = {
        rig.send(prompt)[0]: count
        for prompt, count in (
            (chat("hi"), 31),
            ("1234", 4),
            ("2024-01-15", 10),
            ([504, 3575], 2),
            (" hello" * 3000, 3000),
        )
    }
    eventually(lambda: len(rig.generated("e1")) == len(sent), "all requests reach the engine")
    assert {r.uid: len(r.prompt_ids) for r in rig.generated("e1")} == sent


def test_a_tokenizer_killed_with_work_in_hand_loses_and_doubles_nothing(rig: Rig, start: StartTokenizer) -> None:
    first = start("tok-a")
    uids = [rig.send(chat(f"number {i}"))[0] for i in range(60)]
    eventually(lambda: sum(rig.pending().values()) == 60, "the first tokenizer has everything in hand")
    start("tok-b")
    first.kill()
    rig.engine("e1")
    eventually(lambda: rig.queue_len() == 0, "the second tokenizer takes over")
    assert Counter(r.uid for r in rig.generated("e1")) == Counter(uids)
    eventually(lambda: set(rig.pending().values()) == {0} and len(rig.pending()) == 1, "the dead consumer is forgotten")


def test_a_tokenizer_killed_in_mid_batch_loses_and_doubles_nothing(rig: Rig, start: StartTokenizer) -> None:
    rig.engine("e1")
    first = start("tok-a")
    start("tok-b")
    uids = [rig.send(chat("word " * (i % 50)), n=1 + i % 3) for i in range(300)]
    first.kill()
    bad = [rig.send("x " * 50_000)[0] for _ in range(3)]
    uids += [rig.send("after")]
    eventually(lambda: rig.queue_len() == 0, "the second tokenizer does all")
    assert Counter(r.uid for r in rig.generated("e1")) == Counter(u for several in uids for u in several)
    assert [rig.error_of(uid)[0] for uid in bad] == [400] * 3


def test_a_drained_tokenizer_leaves_cleanly_and_its_held_requests_to_others(rig: Rig, start: StartTokenizer) -> None:
    first = start("tok-a")
    uids = [rig.send(str(i))[0] for i in range(10)]
    eventually(lambda: sum(rig.pending().values()) == 10, "the tokenizer holds the requests")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(20) == 0, first.log
    assert rig.queue_len() == 10
    rig.engine("e1")
    start("tok-b")
    eventually(lambda: rig.queue_len() == 0, "another tokenizer takes over")
    assert Counter(r.uid for r in rig.generated("e1")) == Counter(uids)


def test_prompts_are_not_in_the_log(rig: Rig, start: StartTokenizer) -> None:
    rig.engine("e1")
    tokenizer = start("tok-a")
    uids = rig.send("secretword " * 9000) + rig.send(chat("secretword")) + rig.send("secretword", [10**6])
    eventually(lambda: rig.queue_len() == 0, "all is done")
    assert rig.is_ended([uids[0], uids[2], uids[3]])
    assert tokenizer.log and "secretword" not in tokenizer.log


def test_a_model_that_cannot_be_served_stops_the_start_with_its_reason(
    rig: Rig, start: StartTokenizer, tmp_path: Path
) -> None:
    tokenizer = start("tok-a", str(tmp_path / "nothing"))
    assert tokenizer.process.wait(20) == 2
    assert "no such folder" in tokenizer.log


def test_the_probes_and_metrics_answer(rig: Rig, start: StartTokenizer) -> None:
    rig.engine("e1")
    start("tok-a", "bytes")
    rig.send("a")
    eventually(lambda: rig.queue_len() == 0, "the request is done")
    (beat,) = eventually(lambda: rig.broker.run(look(rig.keys, "tokenizer")), "the tokenizer beats").values()
    address = f"http://127.0.0.1:{decode(Heartbeat, beat).port}"
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'millrace_tokenizer_requests_total{outcome="moved"} 1.0' in text
    with urllib.request.urlopen(f"{address}/readyz", timeout=10) as answer:
        assert answer.status == 200


def test_a_queue_that_is_none_is_put_aside_and_got_over(rig: Rig, start: StartTokenizer) -> None:
    rig.engine("e1")
    tokenizer = start("tok-a", "bytes")
    queue = rig.keys.tokenize(MODEL)
    rig.broker.run(command("DEL", queue))
    rig.broker.run(command("SET", queue, "x"))
    eventually(lambda: rig.broker.run(command("GET", rig.keys.aside(queue))) == b"x", "it was put aside")
    rig.send("a")
    eventually(lambda: len(rig.generated("e1")) == 1, "it goes on")
    assert tokenizer.process.poll() is None
    assert tokenizer.log.count("it was put aside") == 1
