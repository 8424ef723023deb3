"""What a launch consists of: instances, ports, threads, the model's name."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.launcher.defaults import model_variables, plan
from services.launcher.ports import Ports
from services.launcher.settings import LauncherSettings
from shared.errors import ConfigError
from shared.settings import load


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MILLRACE_", "OMP_", "KMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MILLRACE_PORT", "0")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def make(**overrides: object) -> dict[str, dict[str, str]]:
    """Plan a launch; give instance -> environment."""
    launch = plan(load(LauncherSettings, overrides), dict(os.environ))
    return {spec.instance: dict(spec.env) for spec in launch.specs}


def test_one_of_each_by_default_each_with_its_name() -> None:
    specs = make()
    assert set(specs) == {"api-0", "tokenizer-0", "scheduler-0", "detokenizer-0"}
    assert all(env["MILLRACE_NAME"] == instance for instance, env in specs.items())


def test_more_of_each_on_ports_of_their_own() -> None:
    specs = make(apis=2, tokenizers=2, schedulers=3, detokenizers=2)
    assert len(specs) == 9
    ports = [env.get("MILLRACE_HEALTH_PORT") for name, env in specs.items() if not name.startswith("api")]
    ports += [env["MILLRACE_PORT"] for name, env in specs.items() if name.startswith("api")]
    assert None not in ports
    assert len(set(ports)) == 9


def test_nothing_listens_to_the_world_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = make()
    assert specs["api-0"]["MILLRACE_HOST"] == "127.0.0.1"
    assert specs["scheduler-0"]["MILLRACE_HEALTH_HOST"] == "127.0.0.1"
    monkeypatch.setenv("MILLRACE_HOST", "0.0.0.0")
    assert make()["api-0"]["MILLRACE_HOST"] == "0.0.0.0"
    launch = plan(load(LauncherSettings), dict(os.environ))
    assert launch.base_url.startswith("http://127.0.0.1:")


def test_the_engine_gets_the_cores_and_the_others_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = make()
    assert specs["scheduler-0"]["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    for name in ("api-0", "tokenizer-0", "detokenizer-0"):
        assert specs[name]["OMP_NUM_THREADS"] == "1"
        assert specs[name]["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert make()["scheduler-0"]["OMP_NUM_THREADS"] == "7"


def test_several_engines_share_the_cores() -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {env["MILLRACE_THREADS"] for name, env in make(schedulers=2).items() if "scheduler" in name} == {str(share)}


def test_the_port_that_was_asked_for_must_be_free(busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_PORT", str(busy_port))
    with pytest.raises(ConfigError, match=f"MILLRACE_PORT: cannot listen on 127.0.0.1:{busy_port}"):
        make()


def test_other_ports_are_the_next_free_ones(busy_port: int) -> None:
    ports = Ports()
    assert ports.next_free("127.0.0.1", busy_port, step=1) > busy_port
    first = ports.next_free("127.0.0.1", 20000, step=1)
    assert ports.next_free("127.0.0.1", first, step=1) > first


def test_a_port_stays_claimed_while_nobody_listens_there() -> None:
    mine, others = Ports(), Ports()
    first = mine.next_free("127.0.0.1", 20000, step=1)
    assert others.next_free("127.0.0.1", first, step=1) > first
    with pytest.raises(ConfigError, match=f"MILLRACE_PORT: {first} is another launcher's"):
        others.exactly("127.0.0.1", first)
    del mine
    assert others.exactly("127.0.0.1", first) == first


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(ConfigError, match="MILLRACE_HEALTH_HOST"):
        Ports().next_free("192.0.2.1", 20000)


def test_the_embedded_model_is_the_default() -> None:
    assert model_variables({}) == {"MILLRACE_SERVED_MODEL_NAME": "smollm2-135m-instruct"}
    assert model_variables({"MILLRACE_SERVED_MODEL_NAME": "mine"}) == {}


def test_the_fake_engine_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE", "fake")
    assert model_variables({})["MILLRACE_MODEL"] == "bytes"


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLRACE_MODEL", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="MILLRACE_MODEL"):
        model_variables({})
