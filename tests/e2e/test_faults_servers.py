"""The server behind the broker takes no writes, answers late, or is replaced: it is told, and got over, by itself."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.launcher.processes import before_exec
from services.launcher.redis_server import RedisServer, free_port
from tests.e2e.faults.crowd import Crowd, check_whole, wait_begun, wait_heard
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stacks import MANY_SLOTS, Elsewhere, ask_undisturbed, launched, stream_bodies
from tests.e2e.faults.wire import Wire
from tests.e2e.stack import Stack
from tests.waiting import eventually

NUM_STREAMS = 12
NUM_TOKENS = 150
STEP = ("--fake-step-ms", "20", *MANY_SLOTS)
CANARY_LIMIT_S = 30


class Plant:
    """A stack whose Redis is reached through a wire, and the commands that spoil the server."""

    def __init__(self, stack: Stack, server: RedisServer, wire: Wire) -> None:
        self.stack = stack
        self.server = server
        self.wire = wire

    def command(self, *words: Any) -> Any:
        """Run a command on the server."""
        with self.stack.redis() as client:
            return client.execute_command(*words)


@pytest.fixture(scope="module")
def plant(redis_program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"))
    server.start()
    with Wire(server.port) as wire:
        pairs = ("--apis", "2", "--schedulers", "2", "--tokenizers", "2", "--detokenizers", "2")
        url = f"redis://127.0.0.1:{wire.port}/0"
        with launched(tmp_path_factory.mktemp("stack"), *STEP, *pairs, redis_url=url) as stack:
            yield Plant(stack, server, wire)
    server.kill()


@pytest.fixture(scope="module")
def undisturbed(plant: Plant) -> dict[str, str]:
    return ask_undisturbed(plant.stack, NUM_STREAMS, NUM_TOKENS)


def sings(stack: Stack) -> bool:
    answer = stack.client.post("/v1/completions", json=stack.complete_body("canary", max_tokens=1, ignore_eos=True))
    return answer.status_code == 200


def read_only(plant: Plant) -> None:
    plant.command("REPLICAOF", "127.0.0.1", free_port())


def writes_again(plant: Plant) -> None:
    plant.command("REPLICAOF", "NO", "ONE")


def disk_full(plant: Plant) -> None:
    """Let a snapshot fail, as it does without room for it: the server then refuses all writes."""
    (plant.server.directory / "dump.rdb").mkdir(exist_ok=True)
    plant.command("CONFIG", "SET", "save", "36000 1000000")
    plant.command("BGSAVE")
    with plant.stack.redis() as client:
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the snapshot has failed")


def disk_free(plant: Plant) -> None:
    plant.command("CONFIG", "SET", "save", "")


def no_replicas(plant: Plant) -> None:
    plant.command("CONFIG", "SET", "min-replicas-to-write", "1")


def replicas(plant: Plant) -> None:
    plant.command("CONFIG", "SET", "min-replicas-to-write", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "mend"),
    [(read_only, writes_again), (disk_full, disk_free), (no_replicas, replicas)],
    ids=["READONLY", "MISCONF", "NOREPLICAS"],
)
def test_a_server_that_takes_no_writes_is_told_and_got_over(
    plant: Plant, undisturbed: dict[str, str], spoil: Any, mend: Any
) -> None:
    """Reads still answer. New requests are refused; running ones stand still, and then go on as if nothing was."""
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        spoil(plant)
        try:
            eventually(lambda: "broker" in stack.client.get("/readyz").json()["missing"], "the api misses the broker")
            refused = stack.client.post("/v1/completions", json=stack.complete_body("x", max_tokens=1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        finally:
            mend(plant)
        eventually(lambda: sings(stack), "the canary sings", CANARY_LIMIT_S)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert total(stack, "api", "millrace_requests_reopened_total") == 0
    stack.wait_ready()
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_a_slow_and_broken_wire_changes_no_token(plant: Plant, undisturbed: dict[str, str]) -> None:
    stack = plant.stack
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        plant.wire.delay(0.2)
        wait_heard(clients, 2 * NUM_STREAMS)
        plant.wire.cut()
        wait_heard(clients, 2 * NUM_STREAMS)
        plant.wire.delay(0.0)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert total(stack, "api", "millrace_requests_reopened_total") == 0
    stack.wait_ready()
    wait_quiet(stack, texts=False)


class Sentinel:
    """A process that watches a master, and makes its replica one when it is gone."""

    def __init__(self, program: Path, folder: Path, master_port: int) -> None:
        self.port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor mill 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds mill 500\nsentinel failover-timeout mill 3000\n"
        )
        parent = os.getpid()
        with (folder / "sentinel.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, config, "--sentinel"], stdout=log, stderr=log, preexec_fn=lambda: before_exec(parent)
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Watched(Elsewhere):
    """A stack that asks a sentinel where its broker is."""

    def __init__(self, folder: Path, *flags: str, port: int, servers: list[RedisServer]) -> None:
        self.servers = servers
        super().__init__(folder, *flags, redis_url=f"redis+sentinel://127.0.0.1:{port}/mill/0")

    def redis(self) -> Any:
        """Connect to whoever is the master now."""
        for server in self.servers:
            client = redis.Redis(port=server.port, decode_responses=True)
            try:
                if client.info("replication")["role"] == "master":
                    return client
            except redis.ConnectionError:
                pass
            client.close()
        raise AssertionError("no master")


@pytest.mark.slow
def test_a_replica_is_promoted_by_sentinels(redis_program: Any, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """The master dies in mid-stream. Its replica may lack the last of it; what clients hear is true in any case."""
    servers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        servers.append(RedisServer(redis_program, tmp_path / name))
        servers[-1].start()
    sentinel = None
    try:
        with redis.Redis(port=servers[1].port) as replica:
            replica.replicaof("127.0.0.1", servers[0].port)
            eventually(lambda: replica.info("replication")["master_link_status"] == "up", "the replica is in step")
        sentinel = Sentinel(redis_program.path, tmp_path, servers[0].port)
        with redis.Redis(port=sentinel.port, decode_responses=True) as asked:
            eventually(lambda: knows_replica(asked), "the sentinel knows the replica")
        stack = Watched(tmp_path / "stack", "--engine", "fake", *STEP, port=sentinel.port, servers=servers)
        try:
            with Crowd() as crowd:
                clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
                wait_begun(clients)
                servers[0].kill()
                eventually(lambda: sings(stack), "the canary sings", 60)
                crowd.wait(clients)
            for client in clients:
                expected = undisturbed[client.body["prompt"]]
                assert expected.startswith(client.text)
                assert client.text == expected if client.done else client.error["code"] == "broker_lost_data"
            assert sum(client.done for client in clients) > 0
            stack.wait_ready()
            wait_quiet(stack, ended_logs=True, texts=False)
        finally:
            stack.close()
    finally:
        for process in (sentinel, *servers):
            if process is not None:
                process.kill()


def knows_replica(asked: Any) -> bool:
    """Whether a sentinel has found a replica of the master that it could promote."""
    try:
        return len(asked.sentinel_slaves("mill")) == 1
    except redis.RedisError:
        return False
