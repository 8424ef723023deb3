"""Two installations on one Redis: each has its own prefix and a user that may touch nothing else."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.conftest import StartRedis
from tests.e2e.stack import Stack

PASSWORD = "p@ss:w/o?r#d%25 é"
NUM_ASKED = {"one": 5, "two": 9}


@pytest.fixture
def admin(start_redis: StartRedis) -> Iterator["redis.Redis"]:
    """The administrator of a server with a user for each installation: its prefix alone, and no command of theirs."""
    server = start_redis()
    client = redis.Redis.from_url(server.url, decode_responses=True)
    for name in NUM_ASKED:
        rights = (f"~{name}:*", f"&{name}:*", "+@all", "-flushdb", "-flushall", "-keys", "-config", "-acl")
        client.execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", "resetkeys", "resetchannels", *rights)
    yield client
    client.close()


@pytest.fixture
def stacks(admin: "redis.Redis", tmp_path: Path) -> Iterator[dict[str, Stack]]:
    port = admin.connection_pool.connection_kwargs["port"]
    started: dict[str, Stack] = {}
    try:
        for name in NUM_ASKED:
            flags = ("--engine", "fake", "--redis-url", f"redis://127.0.0.1:{port}/0", "--redis-prefix", name)
            secret = {"MILLRACE_REDIS_USERNAME": name, "MILLRACE_REDIS_PASSWORD": PASSWORD}
            started[name] = Stack(tmp_path / name, *flags, "--served-model-name", f"model-{name}", env=secret)
        yield started
    finally:
        for stack in started.values():
            stack.close()


@pytest.mark.slow
def test_they_know_nothing_of_each_other(admin: "redis.Redis", stacks: dict[str, Stack]) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (name, pool.submit(stacks[name].complete, "hello", max_tokens=20))
            for name, count in NUM_ASKED.items()
            for _ in range(count)
        ]
        answers = [(name, answer.result(60)) for name, answer in asked]
    assert {answer["model"] for name, answer in answers if name == "one"} == {"model-one"}
    for name, stack in stacks.items():
        assert stack.metric("api-0", "millrace_requests_finished_total") == NUM_ASKED[name]
        assert [entry["id"] for entry in stack.client.get("/v1/models").json()["data"]] == [f"model-{name}"]
    prefixes = {key.partition(":")[0] for key in admin.scan_iter()}
    assert prefixes == set(NUM_ASKED)
    assert not [stack.tail() for stack in stacks.values() if PASSWORD in stack.log.read_text("utf-8")]
    denied = admin.execute_command("ACL", "LOG")
    assert denied == []
