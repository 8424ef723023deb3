"""Redis goes away, comes back empty, is full, is wiped: the services go on by themselves, and every answer is true."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.launcher.redis_server import RedisServer
from shared.broker.connection import SHARED_CONNECTIONS
from tests.conftest import StartRedis
from tests.e2e.faults.crowd import Client, Crowd, check_whole, wait_begun, wait_heard
from tests.e2e.faults.quiet import api_urls, keys_left, slots_in_use, total, wait_quiet
from tests.e2e.faults.stacks import MANY_SLOTS, ask_undisturbed, launched, stream_bodies
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

NUM_STREAMS = 12
NUM_TOKENS = 120
STEP = ("--fake-step-ms", "20", *MANY_SLOTS)
WORDS = [chr(letter) for letter in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"]
"""Letters that a bias forces, so that a stream which got another one's token shows it."""


class Served:
    """A stack on a Redis of its own that the test may stop, fill and wipe."""

    def __init__(self, stack: Stack, server: RedisServer) -> None:
        self.stack = stack
        self.server = server

    def command(self, *words: Any) -> Any:
        """Run a command on the server."""
        with self.stack.redis() as client:
            return client.execute_command(*words)

    def canary(self) -> bool:
        """Ask for one token."""
        answer = self.stack.client.post(
            "/v1/completions", json=self.stack.complete_body("canary", max_tokens=1, ignore_eos=True)
        )
        return answer.status_code == 200


@contextmanager
def served(folder: Path, server: RedisServer, *flags: str) -> Iterator[Served]:
    with launched(folder, *STEP, *flags, redis_url=server.url) as stack:
        yield Served(stack, server)


@pytest.fixture(scope="module")
def own(redis_program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"), persistent=False)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def plant(own: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two apis and detokenizers, one tokenizer and engine, a Redis without persistence."""
    with served(tmp_path_factory.mktemp("plant"), own, "--apis", "2", "--detokenizers", "2") as one:
        yield one


@pytest.fixture(scope="module")
def undisturbed(plant: Served) -> dict[str, str]:
    return ask_undisturbed(plant.stack, NUM_STREAMS, NUM_TOKENS)


def check_true(clients: list[Client], undisturbed: dict[str, str]) -> None:
    """Every answer is complete, or ends with an error; what was said of it is true in any case."""
    for client in clients:
        expected = undisturbed[client.body["prompt"]]
        assert expected.startswith(client.text), (client.text, expected)
        if client.done:
            assert client.text == expected
        else:
            assert client.error is not None


def forced(stack: Stack, number: int, num_tokens: int, **more: Any) -> Json:
    """A completion that can only be one letter, again and again."""
    letter = WORDS[number % len(WORDS)]
    return stack.complete_body("hi", max_tokens=num_tokens, ignore_eos=True, logit_bias={str(ord(letter)): 100}, **more)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_restart_without_its_data(plant: Served, undisturbed: dict[str, str], moment: str) -> None:
    stack = plant.stack
    stack.wait_ready()
    pids = stack.pids()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS)) if moment == "busy" else []
        wait_begun(clients)
        plant.server.kill()
        eventually(lambda: "broker" in stack.client.get("/readyz").json()["missing"], "the api misses the broker")
        refused = stack.client.post("/v1/completions", json=stack.complete_body("x", max_tokens=1))
        assert refused.status_code == 503
        plant.server.start()
        eventually(plant.canary, "the canary sings")
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS) if clients else None
    stack.wait_ready()
    assert stack.pids() == pids
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_killed_connections_are_invisible(plant: Served, undisturbed: dict[str, str]) -> None:
    stack = plant.stack
    stack.wait_ready()
    reopened = total(stack, "api", "millrace_requests_reopened_total")
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        for _ in range(3):
            plant.command("CLIENT", "KILL", "TYPE", "normal")
            wait_heard(clients, NUM_STREAMS)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert total(stack, "api", "millrace_requests_reopened_total") == reopened
    wait_quiet(stack, texts=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["everything", "group", "streams"])
def test_keys_that_vanish_come_back(plant: Served, undisturbed: dict[str, str], what: str) -> None:
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        if what == "everything":
            plant.command("FLUSHALL")
        elif what == "group":
            plant.command("XGROUP", "DESTROY", f"millrace:tokenize:{stack.model}", "tokenizers")
        else:
            for pattern in ("millrace:tokenize:*", "millrace:tokens:*", "millrace:inbox:*"):
                for key in plant.command("KEYS", pattern):
                    plant.command("DEL", key)
        eventually(plant.canary, "the canary sings")
        crowd.wait(clients)
    check_true(clients, undisturbed)
    stack.wait_ready()
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_a_full_memory_refuses_new_requests_and_is_got_over(plant: Served, undisturbed: dict[str, str]) -> None:
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        plant.command("CONFIG", "SET", "maxmemory", 1)
        try:
            more = [
                stack.client.post("/v1/completions", json=stack.complete_body(f"{i}", max_tokens=1)) for i in range(5)
            ]
            assert {answer.status_code for answer in more} == {503}
            assert all(answer.json()["error"]["code"] in ("broker_full", "broker_unavailable") for answer in more)
            eventually(lambda: stack.client.get("/readyz").status_code == 503, "readiness says so")
        finally:
            plant.command("CONFIG", "SET", "maxmemory", 0)
        eventually(plant.canary, "the canary sings")
        crowd.wait(clients)
    check_true(clients, undisturbed)
    stack.wait_ready()
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_keys_that_a_policy_evicts_leave_no_answer_hanging(plant: Served, undisturbed: dict[str, str]) -> None:
    stack = plant.stack
    stack.wait_ready()
    evicted = lambda: plant.command("INFO", "stats")["evicted_keys"]  # noqa: E731
    before = evicted()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        plant.command("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        plant.command("CONFIG", "SET", "maxmemory", 1)
        try:
            eventually(lambda: evicted() - before >= 20, "keys are evicted")
        finally:
            plant.command("CONFIG", "SET", "maxmemory", 0)
            plant.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        eventually(plant.canary, "the canary sings", 30)
        crowd.wait(clients)
    check_true(clients, undisturbed)
    stack.wait_ready()
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_a_policy_that_evicts_is_warned_of(redis_program: Any, tmp_path: Path, start_redis: StartRedis) -> None:
    server = start_redis(extra={"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"})
    with served(tmp_path, server) as one:
        assert "noeviction" in one.stack.log.read_text(errors="replace")


@pytest.mark.slow
def test_keys_of_a_wrong_kind_are_put_aside_and_harm_nobody(plant: Served, undisturbed: dict[str, str]) -> None:
    """One key of each kind becomes a string while streams run: each is told once, and every answer is complete."""
    stack = plant.stack
    stack.wait_ready()
    pids = stack.pids()
    lines = len(stack.log.read_text(errors="replace").splitlines())
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        for kind in ("reply", "tokens", "inbox", "tokenize", "generate", "alive"):
            key = min(plant.command("KEYS", f"millrace:{kind}:*"), default=f"millrace:tokens:{stack.model}:0")
            plant.command("SET", key, "no stream")
            eventually(lambda key=key: plant.command("TYPE", key) != "string", f"{key} is ours again", 30)
            wait_heard(clients, NUM_STREAMS)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    eventually(plant.canary, "the canary sings", 30)
    log = stack.log.read_text(errors="replace")
    assert log.count("held something else than it must") == 6
    assert len(log.splitlines()) - lines < 60
    assert stack.pids() == pids
    stack.wait_ready()
    aside = plant.command("KEYS", "millrace:strange:*")
    assert len(aside) == 6
    assert all(plant.command("PTTL", key) > 0 for key in aside)
    plant.command("DEL", *aside)
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_few_connections_serve_many_streams(plant: Served) -> None:
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        bodies = [forced(stack, i, 50, stream=True, stream_options={"include_usage": True}) for i in range(200)]
        clients = crowd.ask(stack, bodies, urls=api_urls(stack))
        wait_begun(clients)
        names = re.findall(r"name=(\S*)", plant.command("CLIENT", "LIST"))
        crowd.wait(clients)
    for number, client in enumerate(clients):
        assert client.text == WORDS[number % 64] * 50
    of_apis = [name for name in names if name.startswith("api")]
    assert 2 <= len(of_apis) <= 2 * (SHARED_CONNECTIONS + 2)
    assert len(names) < 64
    wait_quiet(stack)


@pytest.mark.slow
def test_answers_are_not_crossed(plant: Served) -> None:
    """64 clients over two replicas, half of them streaming, some leaving; one replica is killed in the middle."""
    stack = plant.stack
    stack.wait_ready()
    ids: list[str] = []
    with Crowd() as crowd:
        for round_ in range(6):
            bodies = [forced(stack, k, 1 + (7 * k) % 23, stream=(k + round_) % 2 == 0) for k in range(64)]
            clients = crowd.ask(stack, bodies, urls=api_urls(stack))
            leaving = clients[round_::5]
            if round_ == 3:
                stack.kill("api-1")
            crowd.leave(*leaving)
            crowd.wait(clients)
            cut = [c for c in clients if c.broken]
            assert round_ == 3 or not cut
            for number, client in enumerate(clients):
                if client not in leaving and client not in cut and client.status == 200 and client.done:
                    assert client.text == WORDS[number] * (1 + (7 * number) % 23)
                assert not client.text.strip(WORDS[number])
            ids += [c.response_id for c in clients if c.response_id]
            stack.wait_ready()
    assert len(set(ids)) == len(ids) > 200
    eventually(lambda: not slots_in_use(stack), "nothing runs")
    eventually(lambda: not keys_left(stack, ended_logs=True), "no key stays for ever")


@pytest.mark.slow
def test_the_same_request_id_from_several_clients(plant: Served) -> None:
    stack = plant.stack
    stack.wait_ready()
    urls = api_urls(stack)
    with Crowd() as crowd:
        clients = crowd.send(
            [Client(urls[k % 2], forced(stack, k, 30, stream=True), {"X-Request-Id": "same"}) for k in range(4)]
        )
        eventually(lambda: clients[0].num_events >= 5 or clients[0].over.is_set(), "five tokens are said")
        crowd.leave(clients[0])
        crowd.wait(clients)
    for k in (1, 2, 3):
        assert clients[k].text == WORDS[k] * 30
        assert clients[k].headers["x-request-id"] == "same"
    assert len({c.response_id for c in clients}) == 4
    for strange in ("a:b", "*", "../", "x" * 4096, "\u00e9"):
        answer = stack.client.post(
            "/v1/completions",
            json=forced(stack, 0, 1),
            headers={"X-Request-Id": strange.encode("latin-1")},  # type: ignore[dict-item]
        )
        assert answer.status_code in (200, 400)
    assert not [key for key in plant.command("KEYS", "*") if "same" in key or "a:b" in key]
    assert "x" * 4096 not in stack.log.read_text(errors="replace")
    wait_quiet(stack, ended_logs=True, texts=False)


@pytest.mark.slow
def test_restarts_leave_no_consumer_and_no_key_behind(plant: Served) -> None:
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        for instance in ("tokenizer-0", "detokenizer-0", "api-1", "tokenizer-0", "tokenizer-0"):
            clients = crowd.ask(stack, [stack.complete_body(f"{i}", max_tokens=2) for i in range(50)])
            crowd.wait(clients)
            assert all(c.done for c in clients), [(c.status, c.error, c.broken) for c in clients if not c.done][:2]
            stack.kill(instance)
            stack.wait_ready()
        leaving = crowd.ask(stack, [stack.complete_body("l", max_tokens=4000, ignore_eos=True, stream=True)] * 50)
        wait_begun(leaving)
        crowd.leave(*leaving)
    consumers = lambda: plant.command("XINFO", "CONSUMERS", f"millrace:tokenize:{stack.model}", "tokenizers")  # noqa: E731
    eventually(lambda: len(consumers()) == 1, "only the living tokenizer is a consumer")
    eventually(
        lambda: len(plant.command("HKEYS", "millrace:alive:tokenizer")) == 1, "the dead are not registered any more"
    )
    eventually(lambda: len(plant.command("HKEYS", "millrace:alive:api")) == 2, "neither are dead apis")
    wait_quiet(stack, ended_logs=True, texts=False)
