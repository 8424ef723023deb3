"""The chart as Helm itself renders it, in this process; and whether Kubernetes would take what comes out."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

from tests.ops.compose_file import ROOT

CHART: Final = ROOT / "ops/helm/millrace"
CRDS: Final = Path(__file__).parent / "crds"
OLDEST: Final = "1.27"
NEWER: Final = "1.33"
"""What has image volumes and today's form of resource claims."""

Json = dict[str, Any]

kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def as_version(text: str) -> tuple[int, ...]:
    """Make a version comparable."""
    return tuple(int(part) for part in text.split("."))


VERSIONS: Final = sorted(
    {v for v in kubernetes_validate.utils.all_versions() if as_version(v) >= as_version(OLDEST)}, key=as_version
)
"""Every version of Kubernetes that the chart says it runs on and schemas are there for."""

MODELS: Final[Json] = {
    "qwen": {
        "source": {"type": "hub", "id": "Qwen/Qwen3-14B", "revision": "main"},
        "accelerator": "gpu",
        "tensorParallelSize": 4,
        "settings": {"maxSeqLen": 32768, "dtype": "bfloat16"},
        "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "96Gi"}},
        "cache": {"persistent": True},
    },
    "small": {"source": {"type": "claim", "claim": "models", "path": "small"}, "servedName": "small", "replicas": 2},
    "tiny": {},
}
SCHEDULING: Final[Json] = {
    "priorityClassName": "high",
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
    "podAnnotations": {"team": "serving"},
}  # fmt: skip
OWN: Final[Json] = {
    **SCHEDULING,
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "podLabels": {"tier": "a"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}
EVERYTHING: Final[Json] = {
    "global": {"imageRegistry": "registry.example.com/", "imagePullSecrets": [{"name": "pull"}], "storageClass": "ssd"},
    "settings": {"logLevel": "debug", "lease": 10, "otlpEndpoint": "http://collector.tracing:4318"},
    "models": {
        **MODELS,
        "qwen": {
            **MODELS["qwen"],
            **OWN,
            "runtimeClassName": "nvidia",
            "readOnlyRootFilesystem": False,
            "cache": {"persistent": True, "accessModes": ["ReadWriteMany"], "annotations": {"backup": "no"}},
            "warmup": True,
            "autoscaling": {"enabled": True, "serverAddress": "http://prometheus:9090"},
            "tokenizer": {**OWN, "autoscaling": {"enabled": True, "by": "lag"}, "settings": {"tokenizerBatch": 64}},
            "detokenizer": {**OWN, "autoscaling": {"enabled": True}, "settings": {"maxReplies": 8000000}},
        },
        "direct": {"source": {"type": "hub", "id": "owner/direct"}, "download": False},
        "hub2": {"source": {"type": "hub", "id": "owner/two", "hub": "modelscope"}, "cache": {"existingClaim": "mine"}},
    },
    "defaultModel": "tiny",
    "api": {
        **OWN,
        "settings": {"corsOrigins": ["https://a.example", "https://b.example"], "maxQueuedTokens": 8000000},
        "auth": {"keys": ["team=secret"], "metricsKey": "scrape"},
        "autoscaling": {"enabled": True},
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"internal": "true"}},
    },
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example.com"],
                "tls": [{"secretName": "tls", "hosts": ["llm.example.com"]}]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}],
                  "hostnames": ["llm.example.com"]},
    "huggingface": {"token": "hf_x", "endpoint": "https://hub.example.com"},
    "redis": {**SCHEDULING, "tls": {"enabled": True, "existingSecret": "redis-tls"}, "extraArgs": ["--io-threads 2"]},
    "networkPolicy": {
        "apiFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "extraEgress": [{"ports": [{"port": 3128, "protocol": "TCP"}]}],
    },
    "metrics": {
        "podMonitor": {"enabled": True, "labels": {"release": "kps"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "kps"}},
        "dashboards": {"enabled": True},
    },
    "serviceAccount": {"annotations": {"role": "reader"}},
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
}  # fmt: skip
EXTERNAL: Final[Json] = {
    "redis": {"enabled": False},
    "externalRedis": {
        "host": "redis.example.com",
        "port": 6380,
        "db": 3,
        "username": "millrace",
        "existingSecret": "redis",
        "tls": {"enabled": True, "caSecret": "redis-ca"},
    },
}
SENTINELS: Final[Json] = {
    "redis": {"enabled": False},
    "externalRedis": {
        "password": "p@ss:w/o?r#d%25 é",
        "sentinel": {"hosts": ["s1:26379", "s2"], "master": "main", "username": "watch", "existingSecret": "sentinel"},
        "tls": {"enabled": True},
    },
    "models": {"one": {"tokenizer": {"autoscaling": {"enabled": True, "by": "lag"}}}},
}
NOTHING: Final[Json] = {
    "redis": {"persistence": {"enabled": False}},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "metrics": {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}},
    "api": {"replicas": 1, "preStopSeconds": 0, "topologySpreadConstraints": []},
}
MATRIX: Final[Mapping[str, Json]] = {
    "default": {},
    "gpu": {"models": {"qwen": MODELS["qwen"]}},
    "models": {"models": MODELS},
    "external redis": EXTERNAL,
    "sentinels": SENTINELS,
    "everything": EVERYTHING,
    "nothing": NOTHING,
}
FOR_NEWER: Final[Json] = {
    "models": {
        "packed": {"source": {"type": "image", "image": "example.com/model:1"}},
        "claimed": {
            "source": {"type": "path", "path": "/srv/model"},
            "accelerator": "gpu",
            "tensorParallelSize": 2,
            "gpu": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two"}]},
        },
    }
}


def render_texts(values: Json, name: str = "rel", namespace: str = "ns", chart: Path = CHART) -> dict[str, str]:
    """Give what Helm makes of each template, by its path in the chart."""
    with helm.Chart.load(str(chart)) as loaded:
        return dict(loaded.render(values, name=name, namespace=namespace))


def render(values: Json, name: str = "rel", namespace: str = "ns", chart: Path = CHART) -> list[Json]:
    """Give the manifests, hooks included."""
    texts = render_texts(values, name, namespace, chart)
    return [m for path, text in texts.items() if path.endswith(".yaml") for m in yaml.safe_load_all(text) if m]


def find(manifests: list[Json], kind: str, name: str) -> Json:
    """Give the one object of a kind and a name."""
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pods(manifests: list[Json]) -> Iterator[tuple[str, Json]]:
    """Yield the owner's name and the pod of everything that makes pods."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest
        elif "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def containers(pod: Json) -> list[Json]:
    """Give all containers of a pod, those that run first included."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def env(container: Json) -> dict[str, Any]:
    """Give a container's variables: the value, or where it comes from."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env", [])}


def wrong(manifest: Json, version: str) -> str:
    """Say what a version of Kubernetes would not take, or nothing."""
    group = manifest["apiVersion"].partition("/")[0]
    try:
        if (crd := CRDS / f"{manifest['kind'].lower()}.json").is_file():
            jsonschema.validate(manifest, json.loads(crd.read_text("utf-8")))
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    except jsonschema.ValidationError as e:
        return f"{manifest['kind']} {manifest['metadata']['name']}: {list(e.absolute_path)}: {e.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return f"nobody knows a {manifest['kind']} of {group}"
    return ""
