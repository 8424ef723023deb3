"""What a connection must be able to do: users, TLS, sockets, sentinels, many at once; and what a server must be."""

import asyncio
import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.launcher.redis_server import Program, RedisServer, free_port
from shared.broker import control, replies, streams
from shared.broker.connection import SHARED_CONNECTIONS, AsyncBroker, Broker
from shared.errors import BrokerDown, BrokerError, ConfigError
from shared.keys import NUM_SHARDS, Keys
from shared.messages import WIRE_VERSION, Heartbeat
from shared.settings import RedisSettings
from tests.conftest import StartRedis
from tests.contract.broker_driver import MODEL, Driver
from tests.redis_keys import command
from tests.waiting import eventually

pytestmark = pytest.mark.every_redis

ODD_PASSWORD = "p@ss:w/o?r#d%25 é"


# --- users and passwords ---


def test_an_acl_user_with_an_odd_password_limited_to_its_prefix(start_redis: StartRedis) -> None:
    server = start_redis()
    with Broker(RedisSettings(redis_url=server.url)) as admin:
        rules = ["on", "resetchannels", "~mine:*", "+@read", "+@write", "+@scripting", "+@connection", "+time", "+info"]
        admin.run(command("ACL", "SETUSER", "mill", *rules, f">{ODD_PASSWORD}"))
    settings = RedisSettings(
        redis_url=server.url, redis_prefix="mine", redis_username="mill", redis_password=SecretStr(ODD_PASSWORD)
    )
    with Broker(settings) as broker:
        assert broker.prepare() == (WIRE_VERSION, NUM_SHARDS)
        driver = Driver(broker)
        entry = driver.queued()
        driver.fence(entry)
        driver.say(entry, [1], finish="stop")
        driver.run(streams.forget_consumer(broker.keys, MODEL, "t1"))
        driver.run(streams.backlog(broker.keys.tokenize(MODEL)))
        assert ODD_PASSWORD not in broker.url
    with Broker(settings.model_copy(update={"redis_prefix": "theirs"})) as other, pytest.raises(BrokerError) as caught:
        Driver(other)
    assert not isinstance(caught.value, BrokerDown)


@pytest.mark.parametrize("url_password", ["p%40ss%3Aw%2Fo%3Fr%23d%2525%20%C3%A9", None])
def test_a_password_in_the_url_or_beside_it(start_redis: StartRedis, url_password: str | None) -> None:
    server = start_redis(extra={"requirepass": ODD_PASSWORD})
    place = server.url.removeprefix("redis://")
    if url_password is None:
        settings = RedisSettings(redis_url=server.url, redis_password=SecretStr(ODD_PASSWORD))
    else:
        settings = RedisSettings(redis_url=f"redis://:{url_password}@{place}")
    with Broker(settings) as broker:
        assert broker.run(command("PING")) == b"PONG"


def test_a_wrong_password_is_said_and_is_no_outage(start_redis: StartRedis) -> None:
    server = start_redis(extra={"requirepass": "right"})
    for settings in (
        RedisSettings(redis_url=server.url, redis_password=SecretStr("wrong-secret")),
        RedisSettings(redis_url=server.url),
    ):
        with Broker(settings) as broker, pytest.raises(BrokerError, match="refuses this user") as caught:
            broker.run(command("PING"))
        assert not isinstance(caught.value, BrokerDown)
        assert "wrong-secret" not in str(caught.value)


# --- other ways to a server ---


def test_a_unix_socket(start_redis: StartRedis, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    start_redis(extra={"unixsocket": str(path)})
    with Broker(RedisSettings(redis_url=f"unix://{path}?db=2")) as broker:
        broker.run(command("SET", "millrace:x", "1"))
        assert b"db=2" in broker.run(command("CLIENT", "LIST"))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate for localhost that signs itself."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            *names,
            "-keyout",
            key,
            "-out",
            cert,
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


def test_tls_with_a_ca_file_and_never_without_trust(
    start_redis: StartRedis, redis_program: Program, certificate: tuple[Path, Path]
) -> None:
    key, cert = certificate
    port = free_port()
    extra = {"tls-port": str(port), "tls-cert-file": str(cert), "tls-key-file": str(key), "tls-auth-clients": "no"}
    try:
        start_redis(extra=extra)
    except RuntimeError:
        linked = subprocess.run(["ldd", redis_program.path], capture_output=True, text=True, check=True).stdout
        assert "libssl" not in linked, "a server that can speak TLS did not start with it"
        return
    url = f"rediss://localhost:{port}/0"
    with Broker(RedisSettings(redis_url=url, redis_ca_file=cert)) as broker:
        assert broker.run(command("PING")) == b"PONG"
        assert broker.url.startswith("rediss://localhost:")
    with Broker(RedisSettings(redis_url=url)) as broker, pytest.raises(BrokerDown, match=r"(?i)certificate"):
        broker.run(command("PING"))

    async def ping() -> object:
        client = AsyncBroker(RedisSettings(redis_url=url, redis_ca_file=cert))
        try:
            return await client.run(command("PING"))
        finally:
            await client.close()

    assert asyncio.run(ping()) == b"PONG"


@pytest.fixture
def sentinel(
    redis_program: Program, tmp_path: Path, start_redis: StartRedis
) -> Iterator[tuple[RedisServer, RedisServer, int]]:
    """A master, its replica and a sentinel that watches them: (master, replica, port of the sentinel)."""
    master = start_redis(extra={"repl-diskless-sync-delay": "0"})
    replica = start_redis()
    with Broker(RedisSettings(redis_url=replica.url)) as broker:
        broker.run(command("REPLICAOF", "127.0.0.1", master.port))
        in_step = b"master_link_status:up"
        eventually(lambda: in_step in bytes(broker.run(command("INFO"))), "the replica is in step")  # type: ignore[call-overload]
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
    )
    program = [str(redis_program.path), str(conf), "--sentinel"]
    with open(tmp_path / "sentinel.log", "wb") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        with Broker(RedisSettings(redis_url=f"redis://127.0.0.1:{port}")) as watch:

            def knows_the_replica() -> bool:
                try:
                    return b"slaves=1" in bytes(watch.run(command("INFO", "sentinel")))  # type: ignore[call-overload]
                except BrokerDown:
                    return False

            eventually(knows_the_replica, "the sentinel knows master and replica")
        yield master, replica, port
    finally:
        process.kill()
        process.wait()


def test_a_failover_is_followed(sentinel: tuple[RedisServer, RedisServer, int]) -> None:
    master, replica, port = sentinel
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main/0"
    with Broker(RedisSettings(redis_url=url)) as broker:
        driver = Driver(broker)
        uid = driver.opened()
        assert driver.redis("WAIT", 1, 10_000) == 1
        assert int(driver.redis("CONFIG", "GET", "port")[1]) == master.port
        master.kill()

        def moved() -> bool:
            try:
                return int(driver.redis("CONFIG", "GET", "port")[1]) == replica.port and driver.end(uid) in (
                    "OK",
                    "ENDED",
                )
            except BrokerDown:
                return False

        eventually(moved, "the promoted server is used and takes writes")
        assert driver.rings()[0].uid == uid

    async def look() -> object:
        client = AsyncBroker(RedisSettings(redis_url=url))
        try:
            return await client.run(replies.last_id(Keys("millrace"), uid))
        finally:
            await client.close()

    assert asyncio.run(look())


def test_no_sentinel_answers(start_redis: StartRedis) -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()}/main"
    with Broker(RedisSettings(redis_url=url)) as broker, pytest.raises(BrokerDown):
        broker.run(command("PING"))


# --- many at once ---


def test_a_blocking_read_holds_up_no_other_thread(broker: Broker) -> None:
    driver = Driver(broker)
    got: list[list[streams.QueueEntry]] = []

    def read() -> None:
        got.append(broker.run(streams.read_queue(broker.keys, MODEL, "t1", count=1, block_ms=1000)))

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: b"cmd=xreadgroup" in bytes(driver.redis("CLIENT", "LIST")), "the reader waits")
    uid = driver.opened()
    reader.join(10)
    assert [entry.uids for entry in got[0]] == [[uid]]


@pytest.mark.anyio
async def test_an_event_loop_shares_few_connections(redis_settings: RedisSettings) -> None:
    broker = AsyncBroker(redis_settings, name="crowd")
    answers = await asyncio.gather(*(broker.run(command("ECHO", n)) for n in range(300)))
    assert answers == [b"%d" % n for n in range(300)]
    clients = bytes(await broker.run(command("CLIENT", "LIST")))  # type: ignore[call-overload]
    assert clients.count(b"name=crowd ") <= SHARED_CONNECTIONS
    await broker.close()


@pytest.mark.anyio
async def test_blocking_reads_do_not_take_the_shared_connections(redis_settings: RedisSettings) -> None:
    broker = AsyncBroker(redis_settings)
    reads = [
        asyncio.create_task(broker.run(replies.read_inbox(broker.keys, f"r{n}", block_ms=1000)))
        for n in range(SHARED_CONNECTIONS + 4)
    ]
    assert await asyncio.wait_for(broker.run(command("PING")), 5) == b"PONG"
    assert not any(read.done() for read in reads)
    await asyncio.gather(*reads)
    await broker.close()


@pytest.mark.anyio
async def test_connections_that_cannot_be_closed_in_time_do_not_hide_an_outage(redis_settings: RedisSettings) -> None:
    broker = AsyncBroker(redis_settings)
    await asyncio.gather(*(broker.run(command("PING")) for _ in range(3)))
    first, *_, last = broker._idle
    first.socket_connect_timeout = 0  # no time at all to wait for its end
    last._writer.transport.abort()
    with pytest.raises(BrokerDown):
        await broker.run(command("PING"))
    assert await broker.run(command("PING")) == b"PONG"
    await broker.close()


@pytest.mark.anyio
async def test_a_cancelled_call_leaves_no_answer_for_the_next(redis_settings: RedisSettings) -> None:
    broker = AsyncBroker(redis_settings)
    for _ in range(5):
        read = asyncio.create_task(broker.run(replies.read_inbox(broker.keys, "r", block_ms=1000)))
        await broker.run(command("PING"))
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert await broker.run(command("ECHO", "mine")) == b"mine"
    await broker.close()


def test_nothing_to_say(broker: Broker) -> None:
    assert broker.run_many([]) == []


# --- what a server must be ---


def test_the_server_is_judged(start_redis: StartRedis, caplog: pytest.LogCaptureFixture) -> None:
    server = start_redis(extra={"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"})
    with Broker(RedisSettings(redis_url=server.url)) as broker, caplog.at_level(logging.WARNING):
        broker.prepare()
    assert "allkeys-lru" in caplog.text


def test_a_cluster_is_refused(start_redis: StartRedis) -> None:
    port = next(port for port in iter(free_port, None) if port <= 55_535)  # its bus has a port 10,000 above
    server = start_redis(port=port, extra={"cluster-enabled": "yes"})
    with Broker(RedisSettings(redis_url=server.url)) as broker, pytest.raises(ConfigError, match="Redis Cluster"):
        broker.prepare()


def test_the_first_service_decides_for_all(broker: Broker) -> None:
    broker.run(command("HSET", broker.keys.meta, "shards", 7))
    assert broker.prepare() == (WIRE_VERSION, 7)
    broker.run(command("HSET", broker.keys.meta, "wire", WIRE_VERSION + 1))
    with pytest.raises(ConfigError, match="wire version"):
        broker.prepare()


def test_two_installations_do_not_see_each_other(broker: Broker, redis_settings: RedisSettings) -> None:
    with Broker(redis_settings.model_copy(update={"redis_prefix": f"{broker.keys.prefix}:other"})) as other:
        Driver(broker)
        assert other.run(control.look(other.keys, "scheduler")) == {}
        beat = control.beat_and_look(other.keys, "api", "x", Heartbeat(1, "x"))
        assert set(other.run(beat)["api"]) == {"x"}
