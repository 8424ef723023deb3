"""The stack as `docker compose up` runs it, with the embedded model: it answers, heals, drains, scales and goes.

The tests go through one life of one stack, in this order.
"""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from urllib.parse import quote

import httpx
import pytest
from openai import OpenAI

from tests.ops.compose_file import SERVICES, default_config
from tests.ops.containers import MODEL, ContainerStack, docker, free_port, inspect, logs
from tests.waiting import eventually

PASSWORD = "p@ss:w/o?r#d%25 é"
PROMPT = "Once upon a time"
NUM_TOKENS = 80
LONG = {"2": -100, "0": -100}
ANSWER_LIMIT_S = 60.0
"""From `up` with the images there to the end of the first answer."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack() -> Iterator[ContainerStack]:
    """Started by the first test; removed whatever happens."""
    stack = ContainerStack(f"millrace-test-{os.getpid()}", MILLRACE_REDIS_PASSWORD=PASSWORD, MILLRACE_DTYPE="float32")
    yield stack
    stack.down()


@pytest.fixture(scope="module")
def undisturbed(stack: ContainerStack) -> str:
    """What the prompt is answered when nothing happens."""
    return stack.complete(PROMPT, max_tokens=NUM_TOKENS, logit_bias=LONG)


def read(stack: ContainerStack, begun: Event) -> str:
    """Read a stream to its `[DONE]` and give its text; sets `begun` after a few events."""
    text = ""
    with stack.streaming(PROMPT, max_tokens=NUM_TOKENS, logit_bias=LONG) as events:
        for number, event in enumerate(events):
            if number == 5:
                begun.set()
            if event == "[DONE]":
                return text
            text += json.loads(event)["choices"][0]["text"]
    raise AssertionError(f"the stream ended without [DONE] after {text!r}")


def test_from_nothing_to_an_answer(stack: ContainerStack) -> None:
    stack.compose("up", "--detach", "--no-build", "redis", *SERVICES)
    client = OpenAI(base_url=f"{stack.client.base_url}/v1", api_key="none", max_retries=0)

    def ask() -> str:
        try:
            stream = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        except Exception:
            return ""

    assert eventually(ask, "an answer", ANSWER_LIMIT_S, every_s=0.25)
    stack.wait_healthy()


def test_each_process_has_no_rights(stack: ContainerStack) -> None:
    for service in ("redis", *SERVICES):
        found = inspect(stack.container(service))
        assert found["HostConfig"]["ReadonlyRootfs"] and found["HostConfig"]["Init"], service
        status = Path(f"/proc/{found['State']['Pid']}/status").read_text("ascii")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split()[0] != "0", service
        assert service == "redis" or (fields["Uid"].split()[0], fields["Gid"].split()[0]) == ("10001", "0"), service
        assert fields["NoNewPrivs"] == "1" and int(fields["Seccomp"]) == 2, service
        assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}, service


def test_redis_is_not_to_be_had_from_outside(stack: ContainerStack) -> None:
    found = inspect(stack.container("redis"))
    assert set(found["NetworkSettings"]["Networks"]) == {f"{stack.project}_broker"}
    assert not [binding for binding in found["NetworkSettings"]["Ports"].values() if binding]
    without = docker("exec", "--env", "REDISCLI_AUTH=", stack.container("redis"), "redis-cli", "ping", check=False)
    assert "NOAUTH" in without


@pytest.mark.parametrize("service", ["tokenizer", "detokenizer", "scheduler", "redis"])
def test_a_stream_survives_the_death_of_a_container(stack: ContainerStack, undisturbed: str, service: str) -> None:
    stack.wait_healthy()
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(read, stack, begun)
        assert begun.wait(60)
        stack.kill(service)
        assert running.result(120) == undisturbed
    stack.wait_healthy()
    assert stack.complete("The capital of France is", max_tokens=1) == " Paris"


def test_a_stream_survives_a_restart_of_redis(stack: ContainerStack, undisturbed: str) -> None:
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(read, stack, begun)
        assert begun.wait(60)
        stack.compose("restart", "redis")
        assert running.result(120) == undisturbed
    stack.wait_healthy()


def test_a_dead_api_leaves_nothing_running(stack: ContainerStack) -> None:
    def running() -> float:
        text = httpx.get(stack.address("scheduler") + "/metrics", timeout=5).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if re.match(r"millrace_requests_running[{ ]", line)
        )

    with pytest.raises(httpx.HTTPError), stack.streaming(PROMPT, max_tokens=4000, logit_bias=LONG) as events:
        next(events)
        eventually(lambda: running() == 1, "it runs")
        stack.kill("api")
        list(events)
    eventually(lambda: running() == 0, "the slot is free", 60)
    stack.wait_healthy()
    assert stack.complete("The capital of France is", max_tokens=1) == " Paris"


def test_workers_share_one_port_and_one_count(stack: ContainerStack) -> None:
    stack.up("--no-deps", services=("api",), MILLRACE_API_WORKERS="2")
    for _ in range(20):
        with httpx.Client(base_url=stack.client.base_url) as client:
            client.get("/v1/models").raise_for_status()

    def counted() -> float:
        lines = httpx.get(f"{stack.client.base_url}/metrics", timeout=5).text.splitlines()
        rows = [line for line in lines if line.startswith("millrace_http_requests_total") and "/v1/models" in line]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    assert {counted() for _ in range(10)} == {20.0}
    assert len(docker("top", stack.container("api")).splitlines()) == 1 + 1 + 1 + 2  # head, init, parent, workers


def test_more_of_them_share_the_work_and_prometheus_sees_all(stack: ContainerStack) -> None:
    port = free_port()
    plain = {"PROMETHEUS_IMAGE": prometheus_image(), "PROMETHEUS_PORT": str(port)}
    scale = ("--scale", "tokenizer=2", "--scale", "detokenizer=2")
    stack.up(*scale, services=("redis", *SERVICES, "prometheus"), **plain)

    def targets() -> dict[str, int]:
        try:
            found = httpx.get(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5).json()["data"]["activeTargets"]
        except httpx.HTTPError:
            return {}
        jobs = [target["labels"]["job"] for target in found if target["health"] == "up"]
        return {job: jobs.count(job) for job in jobs}

    wanted = {"api": 1, "tokenizer": 2, "scheduler": 1, "detokenizer": 2, "prometheus": 1}
    eventually(lambda: targets() == wanted, "every instance is scraped", 60)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stack.complete, "The capital of France is", max_tokens=1) for _ in range(8)]
        stack.kill("tokenizer", 2)
        assert {answer.result(60) for answer in answers} == {" Paris"}


def prometheus_image() -> str:
    """Give the stack's own Prometheus where it can be had, else one made from whatever Prometheus is here."""
    wanted = str(default_config()["services"]["prometheus"]["image"])
    if docker("images", "--quiet", wanted) or not docker("images", "--quiet", "prom/prometheus:latest"):
        return wanted
    lines = "FROM prom/prometheus:latest\nUSER root\nRUN mkdir -p /prometheus && chown 65534:65534 /prometheus\n"
    docker("build", "--quiet", "--tag", "millrace-test/prometheus:1", "-", stdin=lines)
    return "millrace-test/prometheus:1"


def test_a_stop_lets_what_runs_finish(stack: ContainerStack, undisturbed: str) -> None:
    stack.up("--remove-orphans")
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(read, stack, begun)
        assert begun.wait(60)
        stack.compose("stop", "api")
        assert running.result(60) == undisturbed
    stack.compose("stop")
    states = {service: inspect(stack.container(service))["State"] for service in ("redis", *SERVICES)}
    assert {service: state["ExitCode"] for service, state in states.items()} == dict.fromkeys(states, 0)


def test_the_order_of_the_start_does_not_matter(stack: ContainerStack) -> None:
    for service in ("api", "detokenizer", "scheduler", "tokenizer"):
        docker("start", stack.container(service))
    for service in SERVICES:
        eventually(lambda service=service: stack.probe(service, "/livez")[0] == 200, f"{service} lives")
        status, missing = stack.probe(service, "/readyz")
        assert status == 503 and "broker" in missing, service
    docker("start", stack.container("redis"))
    stack.wait_healthy()
    assert stack.complete("The capital of France is", max_tokens=1) == " Paris"
    assert not any(inspect(stack.container(service))["RestartCount"] for service in SERVICES)


def test_a_wrong_password_is_named_and_never_ready(stack: ContainerStack) -> None:
    name = f"{stack.project}-wrong"
    flags = ("--detach", "--no-deps", "--name", name, "--env", "MILLRACE_REDIS_PASSWORD=wrong")
    stack.compose("run", *flags, "tokenizer")
    try:
        eventually(lambda: "invalid username-password pair" in logs(name), "the reason is logged")
        health = ("python", "-I", "-S", "/app/healthcheck.py", "9101")
        assert "broker" in docker("exec", name, *health, check=False)
    finally:
        docker("rm", "--force", name)


def test_the_password_is_told_to_nobody(stack: ContainerStack) -> None:
    said = [stack.logs()]
    for service in SERVICES:
        said += [stack.probe(service, path)[1] for path in ("/metrics", "/readyz", "/version")]
    said.append(stack.client.post("/v1/completions", json={"model": "none", "prompt": "x"}).text)
    assert not [text for text in said if PASSWORD in text or quote(PASSWORD) in text or quote(PASSWORD, "") in text]


def test_down_leaves_nothing(stack: ContainerStack) -> None:
    stack.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={stack.project}"
    for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        assert not docker(*kind, "--quiet", "--filter", label), kind
