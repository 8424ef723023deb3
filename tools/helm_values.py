"""Write what follows from the chart's values.yaml and the settings: `make helm`. A test keeps the files so.

Owns the form of the comments in values.yaml: `# --` explains a key (a row of the table in README.md), `# @schema`
adds JSON to what values.schema.json says of it, `# @settings` lets a map take the settings of a service. A key
that is explained holds what the user likes; a map that is not explained holds its own keys and no others.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from services.launcher.settings import SERVICES, settings_fields
from shared.settings import ServiceSettings

CHART: Final = Path(__file__).resolve().parent.parent / "ops" / "helm" / "millrace"
MARK: Final = "<!-- values: written by `make helm` -->\n"
CHART_OWNS: Final = frozenset(
    {
        "name", "served_model_name", "drain_timeout", "health_host", "health_port", "health_port_strict",
        "redis_url", "redis_prefix", "redis_username", "redis_password", "redis_password_file", "redis_ca_file",
        "redis_sentinel_username", "redis_sentinel_password", "model", "model_source", "model_revision",
        "host", "port", "api_reuse_port", "api_keys", "api_keys_file", "metrics_key", "device", "tensor_parallel_size",
    }
)  # fmt: skip
"""Settings that values of their own decide."""
SHARED: Final = tuple(name for name in ServiceSettings.model_fields if name not in CHART_OWNS)
"""Settings of every service; a service may have its own value of all but the lease, on which all must agree."""
_LINE: Final = re.compile(r"^( *)(?:# ?(.*)|([A-Za-z]\w*):.*)$")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of values.yaml that is explained.

    Attributes:
        path: the keys that lead to it.
        text: what it is for.
        schema: what `@schema` says.
        settings: the service that `@settings` names, or empty.
    """

    path: tuple[str, ...]
    text: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    settings: str = ""


def entries(text: str) -> Iterator[Entry]:
    """Read the explained keys of a values file, in its order."""
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    inside = -1
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            comment = []
            continue
        indent, said, key = len(match[1]), match[2], match[3]
        if 0 <= inside < indent:
            continue  # below a key that is explained as a whole
        if key is None:
            comment.append(said)
            continue
        parents = [(i, name) for i, name in parents if i < indent] + [(indent, key)]
        inside = -1
        if any(part.startswith("-- ") for part in comment):
            inside = indent
            yield _entry(tuple(name for _, name in parents), comment)
        comment = []


def _entry(path: tuple[str, ...], comment: list[str]) -> Entry:
    start = next(i for i, part in enumerate(comment) if part.startswith("-- "))
    lines = [part for part in comment[start:] if not part.startswith("@")]
    told = {name: value for name, _, value in (part[1:].partition(" ") for part in comment if part.startswith("@"))}
    text = " ".join(lines).removeprefix("-- ")
    return Entry(path, text, json.loads(told.get("schema", "{}")), told.get("settings", ""))


def table(text: str) -> str:
    """Give the table of README.md."""
    values = yaml.safe_load(text)
    rows = [f"| `{'.'.join(e.path)}` | `{_shown(_at(values, e.path))}` | {e.text} |\n" for e in entries(text)]
    return "| value | default | |\n|---|---|---|\n" + "".join(rows)


def readme(old: str, text: str) -> str:
    """Give README.md with the table of today."""
    head, _, _ = old.partition(MARK)
    return head + MARK + "\n" + table(text)


def schema(text: str) -> Json:
    """Give values.schema.json."""
    told = {e.path: e for e in entries(text)}
    whole = _schema(yaml.safe_load(text), (), told)
    model = whole["properties"]["modelDefaults"]
    whole["properties"]["modelDefaults"] = {"$ref": "#/$defs/model"}
    defs = {f"{role}Settings": settings_schema(role) for role in ("service", *SERVICES)}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "$defs": {"model": model, **defs}}


def _schema(value: Any, path: tuple[str, ...], told: Mapping[tuple[str, ...], Entry]) -> Json:
    entry = told.get(path)
    if entry is not None and entry.settings:
        return {"$ref": f"#/$defs/{entry.settings}Settings"}
    if entry is not None:
        return {"description": entry.text, "type": _type(value), **entry.schema}
    if not isinstance(value, dict):
        raise SystemExit(f"values.yaml: {'.'.join(path)} is not explained")
    properties = {key: _schema(below, (*path, key), told) for key, below in value.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_schema(role: str) -> Json:
    """Say which settings a map takes, in camel case, and which values each may have."""
    if role == "service":
        cls: type[ServiceSettings] = ServiceSettings
        names = list(SHARED)
    else:
        cls = SERVICES[role]  # type: ignore[index]
        names = [name for name in cls.model_fields if name not in CHART_OWNS and name != "lease"]
    docs, found = settings_fields(), cls.model_json_schema(by_alias=False)["properties"]
    properties = {camel(name): {"description": docs[name].text, **_plain(found[name])} for name in names}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(given: Json) -> Json:
    """Drop what says that a setting may be left out: leaving out the key says that here."""
    options = [option for option in given.get("anyOf", [given]) if option.get("type") != "null"]
    return {key: value for key, value in options[0].items() if key not in ("title", "default", "format")}


def camel(name: str) -> str:
    """Write a setting's name as the chart does."""
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _type(value: Any) -> str:
    kinds: list[tuple[type, str]] = [(bool, "boolean"), (int, "integer"), (str, "string"), (list, "array")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _shown(value: Any) -> str:
    return json.dumps(value).replace("|", "\\|")


def files() -> dict[Path, str]:
    """Give the text of every file that follows from values.yaml."""
    text = (CHART / "values.yaml").read_text("utf-8")
    return {
        CHART / "values.schema.json": json.dumps(schema(text), indent=1) + "\n",
        CHART / "README.md": readme((CHART / "README.md").read_text("utf-8"), text),
    }


def write() -> None:
    """Write every file that follows from values.yaml and from the settings classes."""
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write()
