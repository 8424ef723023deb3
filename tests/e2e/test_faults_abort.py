"""Clients that leave, at every moment of a request's life: their slots, pages and keys are free at once."""

import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.e2e.faults.crowd import Client, Crowd, check_whole, wait_begun
from tests.e2e.faults.quiet import api_urls, keys_left, slots_in_use, total, wait_quiet
from tests.e2e.faults.sockets import connect, read_events
from tests.e2e.faults.stacks import MANY_SLOTS, launched
from tests.e2e.faults.stops import stopped
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

NUM_SLOTS = 4
STEP_S = 0.1
AUDIT_S = 2.0
"""An engine compares every request with its log once a second; twice that, should the machine be busy."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four slots and long steps, so that steps can be counted; prompts are computed 64 tokens at a time."""
    flags = ("--max-running-requests", str(NUM_SLOTS), "--max-prefill-tokens", "64", "--cache", "naive")
    step = ("--fake-step-ms", str(STEP_S * 1e3))
    with launched(tmp_path_factory.mktemp("slow"), *flags, *step, "--apis", "2") as stack:
        yield stack


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Many slots and short steps."""
    with launched(tmp_path_factory.mktemp("fast"), "--fake-step-ms", "10", "--idle-reply", "2", *MANY_SLOTS) as stack:
        yield stack


def endless(stack: Stack, prompt: str = "x", **more: object) -> Json:
    return stack.complete_body(prompt, max_tokens=4000, ignore_eos=True, **{"stream": True, **more})


def drawn(stack: Stack) -> float:
    return total(stack, "scheduler", "millrace_generated_tokens_total")


def aborted(stack: Stack) -> float:
    return total(stack, "scheduler", "millrace_aborts_total")


def logs(broker: "redis.Redis") -> list[bytes]:
    found: list[bytes] = broker.keys("millrace:reply:*")
    return found


def hang_up(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [hang_up, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_between_tokens_makes_room(
    slow: Stack, leave: Callable[[socket.socket], None], stream: bool
) -> None:
    wait_quiet(slow, texts=False)
    before, gone = drawn(slow), aborted(slow)
    socks = [connect(slow, endless(slow, stream=stream)) for _ in range(NUM_SLOTS)]
    if stream:
        for sock in socks:
            read_events(sock, 3)
    eventually(lambda: drawn(slow) - before >= 3 * NUM_SLOTS, "all run")
    for sock in socks:
        leave(sock)
    eventually(lambda: aborted(slow) == gone + NUM_SLOTS, "all are aborted")
    for sock in socks:
        sock.close()
    short = [slow.complete("y", max_tokens=2, ignore_eos=True) for _ in range(NUM_SLOTS)]
    assert all(answer["usage"]["completion_tokens"] == 2 for answer in short)
    wait_quiet(slow, texts=False)


@pytest.mark.slow
def test_nothing_is_computed_for_nobody_beyond_two_steps(slow: Stack) -> None:
    """The engine sleeps while its requests are ended, so that what it computes when it wakes is for nobody."""
    slow.wait_ready()
    wait_quiet(slow, texts=False)
    before = drawn(slow)
    with Crowd() as crowd, redis.Redis(port=slow.ports()["redis"]) as broker:
        clients = crowd.ask(slow, [endless(slow, f"nobody {i}") for i in range(NUM_SLOTS)])
        wait_begun(clients)
        with stopped(slow, "scheduler-0"):
            steps = [key for key in broker.keys("millrace:tokens:*") if broker.exists(key)]
            eventually(lambda: not any(broker.xlen(key) for key in steps), "all that was sent is said")
            said = sum(int(broker.xrevrange(key, count=1)[0][0].partition(b"-")[2]) for key in logs(broker))
            crowd.leave(*clients)
            eventually(lambda: not logs(broker), "all are ended")
            doorbells = broker.keys("millrace:abort:*")
            rings = len(doorbells) == NUM_SLOTS and all(broker.pttl(key) > 1000 for key in doorbells)
        wait_quiet(slow, texts=False)
    beyond = (drawn(slow) - before - said) / NUM_SLOTS
    print(f"computed for nobody: {beyond:g} steps, those in flight when it fell asleep included")
    assert beyond <= (3 if rings else 3 + AUDIT_S / STEP_S), "who slept longer than a doorbell rings learns it by audit"


@pytest.mark.slow
def test_who_leaves_while_waiting_for_a_slot_is_never_computed(slow: Stack) -> None:
    wait_quiet(slow, texts=False)
    with Crowd() as crowd:
        runners = crowd.ask(slow, [slow.complete_body("r", max_tokens=30, ignore_eos=True, stream=True)] * NUM_SLOTS)
        wait_begun(runners)
        waiting = crowd.ask(slow, [endless(slow, "w")] * 10 + [endless(slow, "w", stream=False)] * 10)
        eventually(lambda: slow.metric("scheduler-0", "millrace_requests_waiting") == 20, "all wait")
        prefilled = total(slow, "scheduler", "millrace_prefill_tokens_total")
        crowd.leave(*waiting)
        last = crowd.ask(slow, [slow.complete_body("last", max_tokens=2, ignore_eos=True, stream=True)])
        eventually(lambda: slow.metric("scheduler-0", "millrace_requests_waiting") <= 1, "only the last one waits")
        crowd.wait([*runners, *last])
    assert all(c.text and c.done for c in [*runners, *last])
    assert total(slow, "scheduler", "millrace_prefill_tokens_total") - prefilled <= 10, "only the last prompt"
    wait_quiet(slow, texts=False)


@pytest.mark.slow
def test_who_leaves_during_the_prompt_leaves_no_page_behind(slow: Stack) -> None:
    wait_quiet(slow, texts=False)
    prompt = "hello " * 60  # six chunks
    expected = slow.complete(prompt, max_tokens=4, ignore_eos=True)["choices"][0]["text"]
    with Crowd() as crowd:
        neighbour = crowd.ask(slow, [slow.complete_body("n", max_tokens=40, ignore_eos=True, stream=True)])
        wait_begun(neighbour)
        for chunks in range(0, 6, 2):
            before = total(slow, "scheduler", "millrace_prefill_tokens_total")
            client = crowd.ask(slow, [endless(slow, prompt)])
            eventually(
                lambda b=before, n=chunks: total(slow, "scheduler", "millrace_prefill_tokens_total") - b >= 50 * n,
                "so much of the prompt is computed",
            )
            crowd.leave(*client)
            eventually(lambda: slow.metric("scheduler-0", "millrace_requests_running") <= 1, "its slot is free")
        crowd.wait(neighbour)
    assert neighbour[0].done and len(neighbour[0].text) == 40
    assert neighbour[0].text == slow.complete("n", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    assert slow.complete(prompt, max_tokens=4, ignore_eos=True)["choices"][0]["text"] == expected
    wait_quiet(slow, texts=False)


@pytest.mark.slow
@pytest.mark.parametrize("instance", ["tokenizer-0", "scheduler-0"])
def test_who_leaves_before_the_engine_knows_is_never_computed(slow: Stack, instance: str) -> None:
    slow.wait_ready()
    wait_quiet(slow, texts=False)
    before = drawn(slow)
    with Crowd() as crowd:
        with stopped(slow, instance):
            clients = crowd.ask(slow, [endless(slow)] * 8)
            eventually(lambda: total(slow, "api", "millrace_requests_in_flight") == 8, "all are accepted")
            crowd.leave(*clients)
            eventually(lambda: total(slow, "api", "millrace_requests_in_flight") == 0, "all are let go")
        wait_quiet(slow, texts=False)
    assert drawn(slow) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["paused", "killed"])
def test_who_leaves_while_the_broker_is_away_makes_room_when_it_is_back(slow: Stack, how: str) -> None:
    slow.wait_ready()
    wait_quiet(slow, texts=False)
    with Crowd() as crowd:
        clients = crowd.ask(slow, [endless(slow, f"{how} {i}") for i in range(NUM_SLOTS)])
        wait_begun(clients)
        if how == "paused":
            with stopped(slow, "redis"):
                crowd.leave(*clients)
                eventually(lambda: total(slow, "api", "millrace_requests_in_flight") == 0, "all are let go")
        else:
            slow.kill("redis")
            crowd.leave(*clients)
        wait_quiet(slow, texts=False)
    slow.wait_ready()
    assert slow.complete("y", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_an_end_and_a_leaving_at_the_same_moment(fast: Stack) -> None:
    """Clients close on their last tokens, on the finish and before [DONE]."""
    pids = fast.pids()
    chance = random.Random(7)
    with Crowd() as crowd:
        for _ in range(25):
            batch = []
            for number in range(16):
                body = fast.complete_body(f"{number}", max_tokens=chance.randrange(1, 7), ignore_eos=True, stream=True)
                batch.append(Leaving(fast.url, body, after=body["max_tokens"] + chance.randrange(2)))
            crowd.send(batch)
            crowd.wait(batch)
    wait_quiet(fast, texts=False)
    assert fast.pids() == pids
    assert "Traceback" not in fast.tail(1000)
    assert fast.complete("abc", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_hundreds_of_leavings_at_random_moments_leak_nothing(fast: Stack) -> None:
    chance = random.Random(11)
    capacity = fast.metric("scheduler-0", "millrace_kv_pages_capacity")
    with Crowd() as crowd:
        for _ in range(6):
            batch = []
            for number in range(64):
                body = fast.complete_body(
                    chance.randbytes(chance.randrange(1, 200)).hex(),
                    max_tokens=chance.randrange(1, 60),
                    ignore_eos=True,
                    stream=number % 2 == 0,
                )
                leaves = body["stream"] and chance.random() < 0.7
                after = chance.randrange(0, 30) if leaves else 10**9
                batch.append(Leaving(fast.url, body, after=after))
            crowd.send(batch)
            crowd.leave(*[c for c in batch if not c.body["stream"] and chance.random() < 0.5])
            crowd.wait(batch)
    wait_quiet(fast)  # the texts of those who left too
    assert fast.metric("scheduler-0", "millrace_kv_pages_capacity") == capacity
    assert fast.metric("scheduler-0", "millrace_slots") == 256
    assert fast.complete("a" * 8000, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_256_streams_that_end_at_once(fast: Stack, record_property: Callable[[str, object], None]) -> None:
    wait_quiet(fast, texts=False)
    with Crowd() as crowd:
        clients = crowd.ask(fast, [endless(fast, f"{i}") for i in range(256)])
        wait_begun(clients, 5)
        assert fast.running() == 256
        began = time.monotonic()
        crowd.leave(*clients)
        eventually(lambda: not slots_in_use(fast), "all slots and pages are free", 30, every_s=0.005)
        took = time.monotonic() - began
    record_property("disconnect_to_free_256_s", round(took, 3))
    print(f"256 streams: from disconnect to free slots and pages {took:.3f} s")
    wait_quiet(fast, texts=False)


@pytest.mark.slow
def test_clients_that_time_out_and_try_again_pile_nothing_up(slow: Stack) -> None:
    """Each try of each client is gone when the next one comes."""
    wait_quiet(slow, texts=False)
    most = 0.0
    with Crowd() as crowd:
        for _ in range(4):
            tries = crowd.ask(slow, [endless(slow, "again", stream=False)] * 6)
            eventually(lambda: total(slow, "api", "millrace_requests_in_flight") == 6, "all are accepted")
            eventually(lambda: total(slow, "scheduler", "millrace_requests_running") == NUM_SLOTS, "the slots are full")
            alive = [total(slow, "scheduler", f"millrace_requests_{what}") for what in ("running", "waiting")]
            most = max(most, sum(alive))
            crowd.leave(*tries)
            eventually(lambda: total(slow, "api", "millrace_requests_in_flight") == 0, "all are let go")
    assert most <= 2 * 6, "those of one try, and what of the one before is being let go"
    wait_quiet(slow, texts=False)
    assert slow.complete("y", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_the_death_of_a_replica_ends_its_requests_and_no_others(slow: Stack) -> None:
    slow.wait_ready()
    urls = api_urls(slow)
    both = slow.complete(["a", "b"], max_tokens=40, ignore_eos=True)["choices"]
    texts = {prompt: choice["text"] for prompt, choice in zip("ab", both, strict=True)}
    with Crowd() as crowd:
        doomed = crowd.ask(slow, [endless(slow, "d")] * 2, urls=urls[:1])
        others = crowd.ask(
            slow,
            [
                slow.complete_body(
                    prompt,
                    max_tokens=40,
                    ignore_eos=True,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                for prompt in texts
            ],
            urls=urls[1:],
        )
        wait_begun([*doomed, *others])
        slow.kill("api-0", signal.SIGKILL)
        crowd.wait(doomed)
        assert not any(c.done for c in doomed)
        crowd.wait(others)
        check_whole(others, lambda c: texts[c.body["prompt"]], 40)
    slow.wait_ready()
    eventually(lambda: not slots_in_use(slow), "its slots are free")
    eventually(lambda: not keys_left(slow, ended_logs=True), "no key of it stays for ever")
    assert total(slow, "scheduler", "millrace_aborts_total", cause="orphan") >= 2


class Leaving(Client):
    """A client that hangs up after some events."""

    def __init__(self, url: str, body: Json, after: int) -> None:
        super().__init__(url, body)
        self._after = after

    def _take(self, data: bytes) -> None:
        super()._take(data)
        if self.num_events > self._after:
            raise ConnectionAbortedError
