"""What the chart makes of a matrix of values: that Kubernetes takes it, and that it holds what it promises."""

import functools
import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from services.launcher.settings import SERVICES
from shared.keys import TOKENIZER_GROUP, Keys
from shared.version import VERSION
from tests.ops.chart import (
    CHART,
    EVERYTHING,
    FOR_NEWER,
    MATRIX,
    MODELS,
    NEWER,
    VERSIONS,
    Json,
    as_version,
    containers,
    env,
    find,
    pods,
    render,
    render_texts,
    wrong,
)
from tests.ops.compose_file import ROOT, default_config
from tools.helm_values import files

SECRETS = ("team=secret", "scrape", "hf_x", "p@ss:w/o?r#d%25 é")


@functools.cache
def made(name: str) -> list[Json]:
    """Render a row of the matrix once."""
    return render(MATRIX[name])


def refused(values: Json) -> str:
    """Give the words with which Helm refuses values."""
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    return str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_manifest(version: str) -> None:
    seen = {json.dumps(m, sort_keys=True): m for name in MATRIX for m in made(name)}
    if as_version(version) >= as_version(NEWER):
        seen |= {json.dumps(m, sort_keys=True): m for m in render(FOR_NEWER)}
    assert not [said for manifest in seen.values() if (said := wrong(manifest, version))]


def test_the_check_sees_what_is_wrong() -> None:
    broken: Json = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {}}
    broken["spec"] = {"replicaz": 1, "selector": {"matchLabels": {}}, "template": {}}
    assert "replicaz" in wrong(broken, VERSIONS[-1])
    scaled = find(made("everything"), "ScaledObject", "rel-millrace-tokenizer-qwen")
    assert "maxReplica" in wrong({**scaled, "spec": {**scaled["spec"], "maxReplica": 1}}, VERSIONS[-1])


@pytest.mark.parametrize("name", MATRIX)
def test_helm_lints_it_strictly(name: str) -> None:
    for version in (VERSIONS[0], VERSIONS[-1]):
        said = helm.lint(str(CHART), MATRIX[name], strict=True, kube_version=version)
        assert not said["errors"]
        assert not [m for m in said["messages"] if m["severity"] > 1]


def test_the_files_that_follow_from_the_values_are_of_today() -> None:
    for path, text in files().items():
        assert path.read_text("utf-8") == text, "make helm"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"api": {"replcas": 1}}, "at '/api': additional properties 'replcas' not allowed"),
        ({"api": {"settings": {"maxQueue": 1}}}, "at '/api/settings': additional properties 'maxQueue' not allowed"),
        ({"api": {"settings": {"maxQueuedRequests": 0}}}, "/api/settings/maxQueuedRequests': minimum: got 0, want 1"),
        ({"models": {"a": {"settings": {"dtype": "int8"}}}}, "/models/a/settings/dtype': value must be one of"),
        ({"models": {"a": {"settings": {"device": "cuda"}}}}, "additional properties 'device' not allowed"),
        ({"models": {"Big": {}}}, "'Big' does not match pattern"),
        ({"models": {"a": {"accelerator": "tpu"}}}, "/models/a/accelerator': value must be one of 'cpu', 'gpu'"),
        ({"models": {"a": {"replicas": "two"}}}, "/models/a/replicas': got string, want integer"),
        ({"drain": {"bufferSeconds": 1}}, "/drain/bufferSeconds': minimum: got 1, want 10"),
        ({"redis": {"enabled": False}}, "redis.enabled is false: fill in externalRedis.host"),
        ({"externalRedis": {"host": "r"}}, "set redis.enabled to false"),
        ({"redis": {"enabled": False}, "externalRedis": {"sentinel": {"hosts": ["s"]}}}, "sentinel.master is empty"),
        (
            {"redis": {"enabled": False}, "externalRedis": {"host": "r", "sentinel": {"hosts": ["s"], "master": "m"}}},
            "are both set",
        ),
        ({"redis": {"tls": {"enabled": True}}}, "redis.tls.enabled needs redis.tls.existingSecret"),
        ({"defaultModel": "b", "models": {"a": {}}}, 'there is no "b" in models (a)'),
        ({"models": {"a": {}, "b": {}}}, "models.a and models.b have the same servedName"),
        ({"models": {"a": {"source": {"type": "hub"}}}}, "models.a.source.id is needed"),
        ({"models": {"a": {"source": {"id": "x/y"}}}}, "set models.a.source.type to hub"),
        ({"models": {"a": {"source": {"type": "path", "path": "x"}}}}, "begins with /"),
        (
            {"models": {"a": {"accelerator": "gpu", "resources": {"limits": {"nvidia.com/gpu": 2}}}}},
            "nvidia.com/gpu 2: GPUs follow from tensorParallelSize (1)",
        ),
        ({"models": {"a": {"replicas": 2, "cache": {"persistent": True}}}}, "need ReadWriteMany"),
        ({"models": {"a": {"autoscaling": {"enabled": True}}}}, "needs models.a.autoscaling.serverAddress"),
        ({"api": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas 9 is above maxReplicas 8"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
    ],
)
def test_wrong_values_are_refused_in_clear_words(values: Json, said: str) -> None:
    assert said in refused(values)


@pytest.mark.parametrize("name", MATRIX)
def test_every_pod_is_held_tight(name: str) -> None:
    found = dict(pods(made(name)))
    assert found
    for owner, pod in found.items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, owner
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, owner
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, owner
            assert security["capabilities"] == {"drop": ["ALL"]}, owner
            writable = name == "everything" and owner == "rel-millrace-scheduler-qwen"
            assert security["readOnlyRootFilesystem"] is not writable, owner
            assert container["resources"]["limits"]["memory"], owner
            if spec.get("restartPolicy") != "Never" and container in spec["containers"]:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), owner
        mounted = {v["name"] for c in containers(pod) for v in c.get("volumeMounts", [])}
        assert mounted - {"data"} == {v["name"] for v in spec.get("volumes", [])} - {"data"}, owner


@pytest.mark.parametrize("name", MATRIX)
def test_probes_ask_what_they_are_for_and_a_start_may_take_an_hour(name: str) -> None:
    for owner, pod in pods(made(name)):
        for container in pod["spec"]["containers"]:
            if container["name"] in SERVICES:
                paths = {p: container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "readiness", "liveness")}
                assert paths == {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}, owner
                ports = {container[f"{p}Probe"]["httpGet"]["port"] for p in paths}
                assert ports == {port["name"] for port in container["ports"]}, owner
                startup = container["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600, owner


@pytest.mark.parametrize("name", MATRIX)
def test_the_grace_period_holds_all_that_an_end_takes(name: str) -> None:
    for owner, pod in pods(made(name)):
        for container in pod["spec"]["containers"]:
            if container["name"] in SERVICES:
                command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["0"])
                pre_stop = int("".join(filter(str.isdigit, command[-1])))
                drain = int(env(container)["MILLRACE_DRAIN_TIMEOUT"])
                assert pod["spec"]["terminationGracePeriodSeconds"] == pre_stop + drain + 15, owner


def test_a_rollout_waits_as_long_as_a_start_may_take() -> None:
    patient = render({"probes": {"startup": {"failureThreshold": 2000}}})
    for manifests, seconds in ((made("default"), 3660), (patient, 10060)):
        assert {m["spec"]["progressDeadlineSeconds"] for m in manifests if m["kind"] == "Deployment"} == {seconds}


def test_a_user_that_the_cluster_picks() -> None:
    manifests = render({"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}})
    context = find(manifests, "Deployment", "rel-millrace-api")["spec"]["template"]["spec"]["securityContext"]
    assert context.keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


def test_gpus_follow_from_the_ranks() -> None:
    pod = find(made("gpu"), "Deployment", "rel-millrace-scheduler-qwen")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": "4"}
    assert container["image"] == f"millrace/engine-gpu:{VERSION}"
    assert (env(container)["MILLRACE_DEVICE"], env(container)["MILLRACE_TENSOR_PARALLEL_SIZE"]) == ("cuda", "4")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    claimed = find(render(FOR_NEWER), "Deployment", "rel-millrace-scheduler-claimed")["spec"]["template"]["spec"]
    assert claimed["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in claimed["containers"][0]["resources"]["limits"]
    assert claimed["resourceClaims"][0]["name"] == "gpus"


@pytest.mark.parametrize("name", MATRIX)
def test_every_scheduler_has_shared_memory(name: str) -> None:
    for owner, pod in pods(made(name)):
        for container in pod["spec"]["containers"]:
            mounts = {m["mountPath"] for m in container.get("volumeMounts", [])}
            assert ("/dev/shm" in mounts) == (container["name"] == "scheduler"), owner


def test_a_new_engine_never_waits_for_the_gpus_of_the_old() -> None:
    strategies = {m["metadata"]["name"]: m["spec"]["strategy"] for m in made("models") if m["kind"] == "Deployment"}
    assert strategies["rel-millrace-scheduler-qwen"] == {"type": "Recreate"}
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    assert strategies["rel-millrace-scheduler-small"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    assert strategies["rel-millrace-api"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_each_model_has_its_services_and_the_api_knows_one() -> None:
    names = {m["metadata"]["name"] for m in made("models") if m["kind"] == "Deployment"}
    parts = {f"rel-millrace-{role}-{key}" for role in ("tokenizer", "scheduler", "detokenizer") for key in MODELS}
    assert names == {"rel-millrace-api", *parts}
    served = {
        name: env(find(made("models"), "Deployment", name)["spec"]["template"]["spec"]["containers"][0])
        for name in names
    }
    assert served["rel-millrace-api"]["MILLRACE_SERVED_MODEL_NAME"] == "Qwen/Qwen3-14B"
    for role in ("tokenizer", "scheduler", "detokenizer"):
        assert served[f"rel-millrace-{role}-qwen"]["MILLRACE_MODEL"] == "Qwen/Qwen3-14B"
        assert served[f"rel-millrace-{role}-qwen"]["HF_HUB_OFFLINE"] == "1"
        assert served[f"rel-millrace-{role}-small"]["MILLRACE_MODEL"] == "/models/small"
        assert "MILLRACE_MODEL" not in served[f"rel-millrace-{role}-tiny"]
    chosen = find(made("everything"), "Deployment", "rel-millrace-api")["spec"]["template"]["spec"]["containers"][0]
    assert env(chosen)["MILLRACE_SERVED_MODEL_NAME"] == "smollm2-135m-instruct"


def test_settings_arrive_as_they_were_written() -> None:
    def variables(name: str) -> dict[str, Any]:
        return env(find(made("everything"), "Deployment", name)["spec"]["template"]["spec"]["containers"][0])

    api = variables("rel-millrace-api")
    assert api["MILLRACE_CORS_ORIGINS"] == "https://a.example,https://b.example"
    assert api["MILLRACE_MAX_QUEUED_TOKENS"] == "8000000"
    assert (api["MILLRACE_LOG_LEVEL"], api["MILLRACE_LEASE"]) == ("debug", "10")
    assert variables("rel-millrace-detokenizer-qwen")["MILLRACE_MAX_REPLIES"] == "8000000"
    assert variables("rel-millrace-scheduler-qwen")["MILLRACE_MAX_SEQ_LEN"] == "32768"
    assert variables("rel-millrace-tokenizer-qwen")["HTTPS_PROXY"] == "http://proxy:3128"


def test_a_value_that_is_false_or_nothing_wins_over_the_default() -> None:
    off = {"cache": {"persistent": True, "keep": False}, "download": False, "readOnlyRootFilesystem": False}
    manifests = render({"models": {"a": {"source": {"type": "hub", "id": "o/m"}, **off}}})
    pod = find(manifests, "Deployment", "rel-millrace-scheduler-a")["spec"]["template"]["spec"]
    assert "initContainers" not in pod and "HF_HUB_OFFLINE" not in env(pod["containers"][0])
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False
    assert "annotations" not in find(manifests, "PersistentVolumeClaim", "rel-millrace-cache-a")["metadata"]


def test_kernels_are_compiled_ahead_where_that_is_asked_for() -> None:
    pod = find(made("everything"), "Deployment", "rel-millrace-scheduler-qwen")["spec"]["template"]["spec"]
    *_, warmup = pod["initContainers"]
    serving = pod["containers"][0]
    assert (warmup["name"], warmup["args"]) == ("warmup", ["services.launcher", "warmup"])
    for same in ("image", "env", "resources", "securityContext", "volumeMounts"):
        assert warmup[same] == serving[same], same
    assert warmup["resources"]["limits"]["nvidia.com/gpu"]
    names = [each["name"] for _, other in pods(made("everything")) for each in containers(other)]
    assert names.count("warmup") == 1
    said = refused({"models": {"a": {"source": {"type": "hub", "id": "o/m"}, "warmup": True}}})
    assert "models.a.warmup compiles kernels for GPUs, but its accelerator is cpu" in said


def test_what_is_kept_on_a_volume_outlives_the_release() -> None:
    claim = find(made("gpu"), "PersistentVolumeClaim", "rel-millrace-cache-qwen")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    pod = find(made("gpu"), "Deployment", "rel-millrace-scheduler-qwen")["spec"]["template"]["spec"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "rel-millrace-cache-qwen"}} in pod["volumes"]
    mine = find(made("everything"), "Deployment", "rel-millrace-scheduler-hub2")["spec"]["template"]["spec"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "mine"}} in mine["volumes"]


def test_a_redis_from_outside() -> None:
    assert not [m for m in made("external redis") if m["metadata"]["name"] == "rel-millrace-redis"]
    for owner, pod in pods(made("external redis")):
        if owner == "rel-millrace-test":
            continue
        given = env(pod["spec"]["containers"][0])
        assert given["MILLRACE_REDIS_URL"] == "rediss://redis.example.com:6380/3", owner
        assert given["MILLRACE_REDIS_USERNAME"] == "millrace"
        assert given["MILLRACE_REDIS_PASSWORD_FILE"] == "/etc/millrace/redis/password"
        assert given["MILLRACE_REDIS_CA_FILE"] == "/etc/millrace/redis-ca/ca.crt"
        sources = {v["name"]: v.get("secret") for v in pod["spec"]["volumes"]}
        assert sources["redis-password"]["secretName"] == "redis"
        assert sources["redis-ca"]["secretName"] == "redis-ca"
    watched = env(
        find(made("sentinels"), "Deployment", "rel-millrace-api")["spec"]["template"]["spec"]["containers"][0]
    )
    assert watched["MILLRACE_REDIS_URL"] == "rediss+sentinel://s1:26379,s2/main/0"
    assert watched["MILLRACE_REDIS_SENTINEL_PASSWORD"]["secretKeyRef"]["name"] == "sentinel"
    scaler = find(made("sentinels"), "ScaledObject", "rel-millrace-tokenizer-one")["spec"]["triggers"][0]
    assert (scaler["type"], scaler["metadata"]["sentinelMaster"]) == ("redis-sentinel-streams", "main")


def test_the_redis_of_the_release_keeps_everything_and_evicts_nothing() -> None:
    stateful = find(made("default"), "StatefulSet", "rel-millrace-redis")["spec"]
    (container,) = stateful["template"]["spec"]["containers"]
    (command,) = container["args"]
    assert "--appendonly yes --appendfsync everysec" in command
    assert "--maxmemory 512mb --maxmemory-policy noeviction" in command
    compose = default_config()["services"]["redis"]
    assert container["image"] == compose["image"]
    assert f"--maxmemory {compose['environment']['MAXMEMORY']}" in command
    assert int(compose["mem_limit"]) == 1536 << 20 and container["resources"]["limits"]["memory"] == "1536Mi"
    tls = find(made("everything"), "StatefulSet", "rel-millrace-redis")["spec"]["template"]["spec"]["containers"][0]
    assert "--port 0 --tls-port 6379" in tls["args"][0] and "--tls" in tls["livenessProbe"]["exec"]["command"][-1]


@pytest.mark.parametrize("name", MATRIX)
def test_secrets_stand_in_secrets_alone(name: str) -> None:
    for manifest in made(name):
        if manifest["kind"] != "Secret":
            text = json.dumps(manifest, ensure_ascii=False)
            assert not [secret for secret in SECRETS if f'"{secret}"' in text], manifest["metadata"]["name"]


def test_a_new_secret_starts_pods_again() -> None:
    def sums(password: str) -> set[str]:
        manifests = render({"redis": {"auth": {"password": password}}})
        return {p["metadata"]["annotations"]["checksum/secrets"] for _, p in pods(manifests) if "labels" in
                p["metadata"] and "checksum/secrets" in p["metadata"].get("annotations", {})}  # fmt: skip

    assert sums("a") == sums("a")
    assert not sums("a") & sums("b")
    keys = render({"redis": {"auth": {"password": "a"}}, "api": {"auth": {"keys": ["new"]}}})
    api = find(keys, "Deployment", "rel-millrace-api")["spec"]["template"]["metadata"]["annotations"]
    assert api["checksum/secrets"] in sums("a"), "the api reads its keys when they change"


def test_images_are_those_that_make_build_makes() -> None:
    built = {service["image"] for service in default_config()["services"].values()}
    used = {c["image"] for _, pod in pods(made("default")) for c in containers(pod)}
    assert used <= built
    gpu = default_config("--env-file", "gpu.env")["services"]["scheduler"]["image"]
    assert gpu in {c["image"] for _, pod in pods(made("gpu")) for c in containers(pod)}
    elsewhere = {c["image"] for _, pod in pods(made("everything")) for c in containers(pod)}
    assert all(image.startswith("registry.example.com/") for image in elsewhere)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == VERSION


def test_more_than_one_pod_has_a_budget_and_a_scaled_one_no_replicas() -> None:
    budgets = {m["metadata"]["name"] for m in made("everything") if m["kind"] == "PodDisruptionBudget"}
    many = {"api", "scheduler-qwen", "tokenizer-qwen", "detokenizer-qwen", "scheduler-small"}
    assert budgets == {f"rel-millrace-{part}" for part in many}
    scaled = [m for m in made("everything") if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert {m["metadata"]["name"] for m in scaled} == {
        f"rel-millrace-{part}" for part in ("api", "scheduler-qwen", "tokenizer-qwen", "detokenizer-qwen")
    }
    for scaler in scaled:
        target = scaler["spec"]["scaleTargetRef"]["name"]
        assert "replicas" not in find(made("everything"), "Deployment", target)["spec"]


def test_the_tokenizer_is_scaled_by_the_stream_it_reads() -> None:
    (trigger,) = find(made("everything"), "ScaledObject", "rel-millrace-tokenizer-qwen")["spec"]["triggers"]
    api = env(find(made("everything"), "Deployment", "rel-millrace-api")["spec"]["template"]["spec"]["containers"][0])
    assert trigger["metadata"]["stream"] == Keys(api["MILLRACE_REDIS_PREFIX"]).tokenize("Qwen/Qwen3-14B")
    assert trigger["metadata"]["consumerGroup"] == TOKENIZER_GROUP
    assert trigger["metadata"]["address"] in api["MILLRACE_REDIS_URL"]
    assert trigger["metadata"]["enableTLS"] == "true"


def test_nobody_but_the_services_reaches_redis() -> None:
    policy = find(made("default"), "NetworkPolicy", "rel-millrace-redis")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy
    ((peer,),) = [rule["from"] for rule in policy["ingress"]]
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["api", "tokenizer", "scheduler", "detokenizer"]
    opened = find(made("everything"), "NetworkPolicy", "rel-millrace-api")["spec"]["ingress"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"name": "ingress"}}} in opened
    workers = find(made("everything"), "NetworkPolicy", "rel-millrace-workers")["spec"]["egress"]
    assert {"ports": [{"port": 4318, "protocol": "TCP"}]} in workers, "the collector of traces"
    assert not [m for m in made("nothing") if m["kind"] == "NetworkPolicy"]


def test_monitoring_comes_from_the_one_set_of_files() -> None:
    rules = sorted((ROOT / "ops/prometheus/rules").glob("*.yml"))
    given = [m["spec"] for m in made("everything") if m["kind"] == "PrometheusRule"]
    assert given == [yaml.safe_load(path.read_text("utf-8")) for path in rules]
    boards = {path.name: path.read_text("utf-8") for path in (ROOT / "ops/grafana/dashboards").glob("*.json")}
    maps = [m["data"] for m in made("everything") if m["kind"] == "ConfigMap" and "data" in m]
    assert {name: json.loads(text) for data in maps for name, text in data.items()} == {
        name: json.loads(text) for name, text in boards.items()
    }
    assert all(len(text) < 1 << 20 for data in maps for text in data.values()), "what a ConfigMap may hold"
    assert not [m for m in made("default") if m["kind"] in ("PodMonitor", "PrometheusRule")], "auto, without the kinds"
    monitors = [m for m in made("everything") if m["kind"] == "PodMonitor"]
    assert {m["spec"]["podMetricsEndpoints"][0]["port"] for m in monitors} == {"http", "metrics"}
    assert {m["spec"]["jobLabel"] for m in monitors} == {"app.kubernetes.io/component"}


def test_a_packed_chart_is_the_same_chart(tmp_path: Path) -> None:
    packed = Path(helm.package(str(CHART), destination=str(tmp_path)))
    with helm.Chart.load_archive(packed.read_bytes()) as loaded:
        texts = dict(loaded.render(EVERYTHING, name="rel", namespace="ns"))
    plain = {path: text for path, text in render_texts(EVERYTHING).items() if "secrets.yaml" not in path}
    assert {path: text for path, text in texts.items() if "secrets.yaml" not in path} == plain


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_readme_render(number: int) -> None:
    blocks = (CHART / "README.md").read_text("utf-8").split("```yaml\n")[1:]
    values = yaml.safe_load(blocks[number].partition("```")[0])
    assert len(blocks) == 2
    assert not [said for manifest in render(values) if (said := wrong(manifest, VERSIONS[-1]))]
