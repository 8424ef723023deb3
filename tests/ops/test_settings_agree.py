"""Every place that names a setting or a port means the same: chart, compose, Dockerfiles, .env.example, documents."""

import functools
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from services.launcher.settings import SERVICES, LauncherSettings, settings_fields
from shared.keys import Role
from shared.settings import ENV_PREFIX
from tests.ops.chart import CHART, EVERYTHING, EXTERNAL, MATRIX, SENTINELS, Json, env, pods, render
from tests.ops.compose_file import ROOT, default_config
from tools.helm_values import CHART_OWNS, SHARED, camel

ROLES = cast("tuple[Role, ...]", tuple(SERVICES))
COMPOSE_OWN = {"MILLRACE_VERSION", "MILLRACE_STOP_GRACE"}
"""Variables of the compose files that are no settings: a tag, and the time from a stop to a kill."""
GIVEN_BY_NAME = {"MILLRACE_REDIS_URL", "MILLRACE_HOST"}
"""Defaults of compose that differ: its Redis, and publishing on this machine alone."""
PORT = {role: SERVICES[role].model_fields["health_port"].default for role in ROLES} | {"api": 8000}
TEXTS = [
    *ROOT.glob("docker-compose*.yml"),
    *ROOT.glob("Dockerfile.*"),
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "gpu.env",
    ROOT / ".env.example",
    ROOT / "Makefile",
    *(path for path in (ROOT / "ops").rglob("*") if path.is_file() and not path.is_symlink()),
]
ANY_VALUE: dict[str, Any] = {"integer": 7, "number": 7, "boolean": True, "string": "auto", "array": []}


def variables(role: Role) -> set[str]:
    """Name the variables that a service reads."""
    return {ENV_PREFIX + field.upper() for field in SERVICES[role].model_fields}


@functools.cache
def everybody() -> set[str]:
    """Name the variables of all settings."""
    return {ENV_PREFIX + field.upper() for field in settings_fields()}


def given(values: Json) -> list[tuple[Role, dict[str, Any]]]:
    """Give the service and the variables of every container of a rendered chart."""
    found = [pod["spec"]["containers"][0] for _, pod in pods(render(values))]
    return [(c["name"], env(c)) for c in found if c["name"] in SERVICES]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_variable_that_is_named_anywhere_is_a_setting(path: Path) -> None:
    named = set(re.findall(r"MILLRACE_[A-Z0-9]+(?:_[A-Z0-9]+)*\b", path.read_text("utf-8")))
    assert named <= everybody() | COMPOSE_OWN


def test_the_example_names_every_setting_and_nothing_else() -> None:
    text = (ROOT / ".env.example").read_text("utf-8")
    assert set(re.findall(r"^#(MILLRACE_\w+)=", text, re.MULTILINE)) == everybody()


@pytest.mark.parametrize("name", [*MATRIX])
def test_the_chart_gives_a_service_only_what_it_reads(name: str) -> None:
    for role, told in given(MATRIX[name]):
        named = {variable for variable in told if variable.startswith(ENV_PREFIX)}
        assert named <= variables(role), role


@pytest.mark.parametrize("values", [EVERYTHING, EXTERNAL, SENTINELS], ids=["everything", "external", "sentinels"])
def test_services_take_what_the_chart_gives(values: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    for role, told in given(values):
        with monkeypatch.context() as patch:
            for name, value in told.items():
                if not name.endswith("_FILE"):
                    patch.setenv(name, value if isinstance(value, str) else "a-secret")
            settings = SERVICES[role]()
        assert settings.drain_timeout == float(told["MILLRACE_DRAIN_TIMEOUT"])
        assert settings.name == "a-secret", "the pod's name, in truth"


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_can_be_set_through_the_chart(role: Role) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))["$defs"]
    own = schema[f"{role}Settings"]["properties"]
    fields = set(SERVICES[role].model_fields) - CHART_OWNS
    assert {camel(field) for field in fields} == set(own) | {camel(field) for field in SHARED}
    assert set(schema["serviceSettings"]["properties"]) == {camel(field) for field in SHARED}


@pytest.mark.parametrize("role", ROLES)
def test_names_in_camel_case_become_the_variables(role: Role) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))["$defs"][f"{role}Settings"]["properties"]
    told = {name: said["enum"][0] if "enum" in said else ANY_VALUE[said["type"]] for name, said in schema.items()}
    for name, said in schema.items():
        if isinstance(told[name], int) and not isinstance(told[name], bool):
            told[name] = max(said.get("minimum", 1), min(said.get("maximum", 1), 1))
    model = {"settings": told} if role == "scheduler" else {role: {"settings": told}}
    values = {"api": {"settings": told}} if role == "api" else {"models": {"one": model}}
    names = {name for found, given_to in given(values) if found == role for name in given_to}
    assert {ENV_PREFIX + field.upper() for field in SERVICES[role].model_fields if camel(field) in told} <= names
    assert names <= variables(role)


def test_defaults_are_the_same_wherever_they_are_written() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    fields = settings_fields()
    assert values["drain"]["timeoutSeconds"] == fields["drain_timeout"].default
    assert values["modelDefaults"]["tensorParallelSize"] == fields["tensor_parallel_size"].default
    assert values["modelDefaults"]["source"]["hub"] == fields["model_source"].default
    assert values["api"]["service"]["port"] == fields["port"].default
    assert {told["MILLRACE_SERVED_MODEL_NAME"] for _, told in given({})} == {fields["served_model_name"].default}
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    written = dict(re.findall(r"\$\{(MILLRACE_\w+):-([^}]*)\}", text))
    for name in set(written) - COMPOSE_OWN - GIVEN_BY_NAME - {"MILLRACE_REDIS_PASSWORD", "MILLRACE_METRICS_KEY"}:
        assert written[name] == str(fields[name.removeprefix(ENV_PREFIX).lower()].default), name


def test_an_end_has_its_time_everywhere() -> None:
    drain = settings_fields()["drain_timeout"].default
    grace = re.search(r"MILLRACE_STOP_GRACE:-(\d+)s", (ROOT / "docker-compose.yml").read_text("utf-8"))
    assert grace is not None and int(grace[1]) >= drain + 10
    for role, told in given({}):
        spec = next(p["spec"] for _, p in pods(render({})) if p["spec"]["containers"][0]["name"] == role)
        assert spec["terminationGracePeriodSeconds"] >= float(told["MILLRACE_DRAIN_TIMEOUT"]) + 10


def test_ports_are_the_same_everywhere() -> None:
    ports = {c["name"]: c["ports"][0]["containerPort"] for _, p in pods(render({})) for c in p["spec"]["containers"]
             if c["name"] in SERVICES}  # fmt: skip
    assert ports == PORT
    assert LauncherSettings.model_fields["health_port"].default == 0
    scrapes = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text("utf-8"))["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in scrapes if "dns_sd_configs" in job}
    assert {role: found[role] for role in ROLES} == PORT
    for role, service in default_config()["services"].items():
        if role in PORT:
            assert service["healthcheck"]["test"][-1] == str(PORT[role])
    exposed = re.findall(r"^EXPOSE (.*)$", "".join(p.read_text("utf-8") for p in ROOT.glob("Dockerfile.*")), re.M)
    assert {int(port) for line in exposed for port in line.split()} == set(PORT.values())
    health = (ROOT / "ops/container/healthcheck.py").read_text("utf-8")
    assert f"PORTS = {tuple(PORT[role] for role in ('api', *[r for r in ROLES if r != 'api']))}" in health
