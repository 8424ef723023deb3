"""docker-compose.yml and its relatives: what they say, without an engine to run it."""

import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.settings import SERVICES as SETTINGS
from services.scheduler.settings import SchedulerSettings
from services.tokenizer.settings import TokenizerSettings
from shared.settings import DEFAULT_MODEL_NAME, ENV_PREFIX, ServiceSettings
from shared.version import VERSION
from tests.ops.compose_file import ROOT, SERVICES, Config, compose_programs, config, default_config

OWN = {"name", "health_host", "health_port", "health_port_strict", "host", "port", "api_reuse_port"}
"""Settings that a container has fixed: its name is its own, and its ports are published from outside."""
PASSWORD = "p@ss:w/o?r#d%25 é"
NOT_IN_1_29 = {"gpus", "start_interval", "required", "develop", "post_start", "pre_stop", "additional_contexts"}
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]


@pytest.fixture(scope="module")
def stack() -> Config:
    return default_config()


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key of a document with its value, at any depth."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def duration_s(text: str) -> float:
    """Read a Go duration."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


@pytest.mark.parametrize("program", compose_programs())
@pytest.mark.parametrize("flags", [(), ("--env-file", "gpu.env")], ids=["cpu", "gpu"])
def test_each_compose_reads_it(program: str, flags: tuple[str, ...]) -> None:
    read = config(compose_programs()[program], *flags)
    assert {"redis", *SERVICES} <= set(read["services"])
    scheduler = read["services"]["scheduler"]
    assert ("deploy" in scheduler) == bool(flags)
    named = "Qwen/Qwen3-0.6B" if flags else DEFAULT_MODEL_NAME
    for role in SERVICES:
        environment = read["services"][role]["environment"]
        assert environment["MILLRACE_REDIS_URL"] == "redis://:millrace@redis:6379/0"
        assert environment["MILLRACE_SERVED_MODEL_NAME"] == named
        assert environment.get("MILLRACE_MODEL") == (named if flags and role != "api" else None)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_said_that_an_older_compose_does_not_know(name: str) -> None:
    document = yaml.safe_load((ROOT / name).read_text("utf-8"))
    assert {key for key in document if not key.startswith("x-")} <= {"services", "networks", "volumes"}
    assert not {key for key, _ in walk(document)} & NOT_IN_1_29
    text = (ROOT / name).read_text("utf-8")
    assert ":+" not in text
    assert not re.search(r"\$\{[^}]*\$\{", text), "a default inside of a default is left as it is"


@pytest.mark.parametrize("role", SERVICES)
def test_every_setting_reaches_its_service(stack: Config, role: Any) -> None:
    settings = {ENV_PREFIX + field.upper() for field in set(SETTINGS[role].model_fields) - OWN}
    passed = {name for name in stack["services"][role]["environment"] if name.startswith(ENV_PREFIX)}
    assert not settings - passed, f"to be added to the environment of {role} in docker-compose.yml"
    assert not passed - settings, f"no settings of {role}; to be taken out of docker-compose.yml"


def test_what_is_set_arrives_and_what_is_not_stays_away() -> None:
    read = default_config(MILLRACE_MAX_SEQ_LEN="2048", MILLRACE_SERVED_MODEL_NAME="owner/model")["services"]
    assert read["scheduler"]["environment"]["MILLRACE_MAX_SEQ_LEN"] == "2048"
    assert read["scheduler"]["environment"]["MILLRACE_NUM_PAGES"] is None
    assert {read[role]["environment"]["MILLRACE_SERVED_MODEL_NAME"] for role in SERVICES} == {"owner/model"}


@pytest.mark.parametrize("program", compose_programs())
def test_a_password_of_any_characters_is_the_same_on_both_sides(program: str, tmp_path: Path) -> None:
    env_file = tmp_path / "own.env"
    env_file.write_text(f"MILLRACE_REDIS_PASSWORD='{PASSWORD}'\n", "utf-8")
    services = config(compose_programs()[program], "--env-file", str(env_file))["services"]
    given = {services[role]["environment"]["MILLRACE_REDIS_PASSWORD"] for role in SERVICES}
    assert given == {services["redis"]["environment"]["REDISCLI_AUTH"]} == {PASSWORD}


def test_each_container_is_held_tight(stack: Config) -> None:
    for name, service in stack["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert service["restart"] == "unless-stopped", name
        assert int(service["mem_limit"]) > 0 and service["pids_limit"] > 0, name
        assert service["logging"]["options"]["max-size"], name
        assert "privileged" not in service and "container_name" not in service, name
        writable = {v["target"] for v in service.get("volumes", []) if not v.get("read_only")}
        assert writable <= {"/cache", "/data", "/prometheus", "/var/lib/grafana"}, name
        assert [path.partition(":")[0] for path in service["tmpfs"]] == ["/tmp"], name


def test_a_container_that_is_not_ours_runs_as_a_plain_user(stack: Config) -> None:
    for name in set(stack["services"]) - set(SERVICES):
        assert stack["services"][name]["user"].partition(":")[0] not in ("", "0", "root"), name


def test_only_the_own_machine_is_let_in(stack: Config) -> None:
    published = {name: s["ports"] for name, s in stack["services"].items() if s.get("ports")}
    assert set(published) == {"api", "prometheus", "grafana"}
    assert {port["host_ip"] for port in chain.from_iterable(published.values())} == {"127.0.0.1"}
    assert stack["networks"]["broker"]["internal"] is True
    assert set(stack["services"]["redis"]["networks"]) == {"broker"}


def test_ports_are_the_users_to_choose() -> None:
    ports = default_config(MILLRACE_HOST="0.0.0.0", MILLRACE_PORT="8100-8103")["services"]["api"]["ports"]
    assert [(p["host_ip"], p["published"], p["target"]) for p in ports] == [("0.0.0.0", "8100-8103", 8000)]


def test_all_wait_for_redis_and_say_when_they_are_ready(stack: Config) -> None:
    ports = {role: SETTINGS[role].model_fields["health_port"].default for role in SERVICES}
    ports["api"] = SETTINGS["api"].model_fields["port"].default
    for role in SERVICES:
        service = stack["services"][role]
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
        assert service["healthcheck"]["test"][-1] == str(ports[role])
        assert duration_s(service["healthcheck"]["start_period"]) >= 600
        assert service["command"] == [f"services.{role}"]


def test_a_stop_leaves_time_for_the_drain(stack: Config) -> None:
    drain_s = ServiceSettings.model_fields["drain_timeout"].default
    assert drain_s == SchedulerSettings.model_fields["drain_timeout"].default
    assert drain_s == TokenizerSettings.model_fields["drain_timeout"].default
    for role in SERVICES:  # the parent of several api workers gives them 10 s beyond the drain
        assert duration_s(stack["services"][role]["stop_grace_period"]) > drain_s + 10


def test_the_broker_keeps_what_it_accepted(stack: Config) -> None:
    redis = stack["services"]["redis"]
    command = " ".join(redis["command"][0].split())
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert option in command
    assert '--requirepass "$$REDISCLI_AUTH"' in command
    assert "millrace" not in command
    assert [v["target"] for v in redis["volumes"]] == ["/data"]


def test_versions_are_fixed_and_agree(stack: Config) -> None:
    images = {name: service["image"] for name, service in stack["services"].items()}
    assert {images[role].rpartition(":")[2] for role in SERVICES} == {VERSION}
    assert not [image for image in images.values() if image.endswith(":latest") or ":" not in image]
    for name in ("Dockerfile.api", "Dockerfile.gpu"):
        assert f"\nARG VERSION={VERSION}\n" in (ROOT / name).read_text("utf-8")


def test_one_torch_everywhere() -> None:
    found = {
        name: re.findall(r"torch==[\d.]+", (ROOT / name).read_text("utf-8"))
        for name in ("Makefile", "Dockerfile.gpu", "docker-compose.yml", "gpu.env")
    }
    assert len(set(chain.from_iterable(found.values()))) == 1, found
    assert all(found.values())


def test_the_gpu_stack_reserves_its_devices() -> None:
    scheduler = default_config("--env-file", "gpu.env", GPUS="1")["services"]["scheduler"]
    (device,) = scheduler["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["1"], "capabilities": ["gpu"]}
    assert int(scheduler["shm_size"]) >= 1 << 30
    assert scheduler["ulimits"]["memlock"] == -1
    assert scheduler["build"]["args"]["ENGINE"] == "gpu" and "cuda" in scheduler["build"]["args"]["BASE"]
    assert scheduler["environment"]["MILLRACE_DEVICE"] == "cuda"
    assert scheduler["image"].startswith("millrace/engine-gpu:")


def test_monitoring_is_a_profile_of_its_own(stack: Config) -> None:
    plain = config(compose_programs()["v2"])["services"]
    assert set(stack["services"]) - set(plain) == {"prometheus", "grafana"}


def test_prometheus_looks_at_every_instance_of_every_service() -> None:
    read = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text("utf-8"))
    ports = {role: SETTINGS[role].model_fields["health_port"].default for role in SERVICES} | {"api": 8000}
    jobs = {job["job_name"]: job for job in read["scrape_configs"]}
    assert set(jobs) == {*SERVICES, "prometheus"}
    for role, port in ports.items():
        (found,) = jobs[role]["dns_sd_configs"]
        assert (found["names"], found["type"], found["port"]) == ([role], "A", port)


def test_grafana_finds_its_data_source_and_its_dashboards(stack: Config) -> None:
    folder = ROOT / "ops/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/millrace.yml").read_text("utf-8"))["datasources"]
    assert (source["uid"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((folder / "dashboards/millrace.yml").read_text("utf-8"))["providers"]
    mounts = {v["target"]: Path(v["source"]) for v in stack["services"]["grafana"]["volumes"] if v["type"] == "bind"}
    assert mounts[provider["options"]["path"]].is_dir()


def test_it_runs_without_another_file(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    assert set(config(compose_programs()["v2"], folder=tmp_path)["services"]) == {"redis", *SERVICES}


def test_every_variable_of_the_files_is_explained() -> None:
    used = {name for file in FILES for name in re.findall(r"\$\{(\w+)", (ROOT / file).read_text("utf-8"))} - {
        "REVISION"
    }
    explained = set(re.findall(r"\w+", (ROOT / "docs/containers.md").read_text("utf-8")))
    explained |= set(re.findall(r"MILLRACE_\w+", (ROOT / ".env.example").read_text("utf-8")))
    assert not used - explained
