"""Names and labels of the chart's objects: cut right, never shared by two releases, and used below another chart."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.settings import RedisSettings
from tests.ops.chart import CHART, EVERYTHING, MATRIX, Json, containers, env, pods, render

HASHES = len("-1234567890-12345")
"""What a Deployment puts behind its name to name a pod, which is its host name."""
LONG = "a-release-whose-name-is-as-long-as-helm-lets-it-be-ok"
LONG_MODEL = "a-model-with-a-name-of-32-letter"
NAMES = ["rel", "millrace", "a-millrace", LONG]


def selectors(manifests: list[Json]) -> dict[tuple[str, str], dict[str, str]]:
    """Give the labels by which each object finds its pods."""
    found = {}
    for manifest in manifests:
        spec: dict[str, Any] = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector if manifest["kind"] == "Service" else selector.get("matchLabels")
        if labels:
            found[manifest["kind"], manifest["metadata"]["name"]] = labels
    return found


def labels_of_pods(manifests: list[Json]) -> dict[str, dict[str, str]]:
    """Give the labels of the pods of each owner."""
    return {owner: pod["metadata"]["labels"] for owner, pod in pods(manifests)}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def long_values() -> Json:
    models = {**EVERYTHING["models"], LONG_MODEL: {"servedName": "x" * 256, "replicas": 2}}
    return {**EVERYTHING, "models": models}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_labels_are_not_too_long(name: str) -> None:
    manifests = render(long_values(), name=name)
    for manifest in manifests:
        own = manifest["metadata"]["name"]
        limit = 63 - (HASHES if manifest["kind"] == "Deployment" else 0)
        assert len(own) <= limit and own[0].isalnum() and own[-1].isalnum(), own
        values = chain(
            manifest["metadata"].get("labels", {}).values(),
            manifest.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}).values(),
        )
        assert all(len(value) <= 63 for value in values), own
    named = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(named) == len(set(named))


def test_long_names_that_differ_in_their_ends_stay_apart() -> None:
    first, second = (LONG_MODEL[:-1] + end for end in "12")
    values = {"models": {first: {"servedName": "a"}, second: {"servedName": "b"}}}
    names = {m["metadata"]["name"] for m in render(values, name=LONG) if m["kind"] == "Deployment"}
    assert len(names) == 7


@pytest.mark.parametrize("other", ["other", "rel-millrace", "millrace"])
def test_two_releases_in_one_namespace_share_nothing(other: str) -> None:
    one, two = render(EVERYTHING, name="rel"), render(EVERYTHING, name=other)
    names: list[set[Any]] = [{(m["kind"], m["metadata"]["name"]) for m in part} for part in (one, two)]
    assert not names[0] & names[1]
    for mine, theirs in ((one, two), (two, one)):
        strangers = labels_of_pods(theirs).values()
        for owner, selector in selectors(mine).items():
            assert not [labels for labels in strangers if matches(selector, labels)], owner
    prefixes = {
        env(c).get("MILLRACE_REDIS_PREFIX") for part in (one, two) for _, p in pods(part) for c in containers(p)
    }
    assert len(prefixes - {None}) == 2


@pytest.mark.parametrize("name", MATRIX)
def test_each_selector_finds_its_own_pods_alone(name: str) -> None:
    manifests = render(MATRIX[name])
    labels = labels_of_pods(manifests)
    for (kind, owner), selector in selectors(manifests).items():
        found = {pod for pod, own in labels.items() if matches(selector, own)}
        if kind in ("Deployment", "StatefulSet", "Service", "PodDisruptionBudget"):
            assert found == {owner}, (kind, owner)
        else:
            assert found, (kind, owner)
    assert all(selector.get("app.kubernetes.io/component") != "test" for selector in selectors(manifests).values())


@pytest.mark.parametrize("name", NAMES)
def test_the_prefix_in_redis_is_one_that_services_take(name: str) -> None:
    for _, pod in pods(render({}, name=name, namespace="n" * 63)):
        prefix = env(pod["spec"]["containers"][0]).get("MILLRACE_REDIS_PREFIX")
        assert prefix is None or RedisSettings(redis_prefix=prefix).redis_prefix == prefix


def test_spread_counts_the_pods_of_the_same_service() -> None:
    for owner, pod in pods(render(EVERYTHING)):
        for constraint in pod["spec"].get("topologySpreadConstraints", []):
            assert matches(constraint["labelSelector"]["matchLabels"], pod["metadata"]["labels"]), owner


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A chart of somebody else's that depends on ours."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "millrace").symlink_to(CHART, target_is_directory=True)
    dependency = {"name": "millrace", "version": "0.1.0", "condition": "millrace.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart), "utf-8")
    return tmp_path


def test_it_serves_as_a_part_of_another_chart(parent: Path) -> None:
    values = {"global": {"imageRegistry": "r.example.com", "anything": {"else": 1}}, "millrace": {"enabled": True}}
    manifests = render(values, chart=parent)
    assert {m["metadata"]["name"] for m in manifests if m["kind"] == "Deployment"} == {
        f"rel-millrace-{part}" for part in ("api", "tokenizer-embedded", "scheduler-embedded", "detokenizer-embedded")
    }
    images = {c["image"] for _, pod in pods(manifests) for c in containers(pod)}
    assert all(image.startswith("r.example.com/") for image in images)
    assert render({"millrace": {"enabled": False}}, chart=parent) == []
    assert render({"enabled": False}) == []
