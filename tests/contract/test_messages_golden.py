"""The wire format does not move: stored bytes of every struct, and the rule that structs only grow at the end."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import WireError
from shared.messages import Delta, Message, StepChunk, decode, encode
from tests.contract.golden_messages import FIELDS, GOLDEN, SAMPLES, shape, structs

ROOT = Path(__file__).parent.parent.parent
by_name = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)


def test_every_struct_has_a_sample_and_stored_bytes() -> None:
    names = set(structs())
    assert {type(s).__name__ for s in SAMPLES} == names
    assert {path.stem for path in GOLDEN.glob("*.msgpack")} == names
    assert set(json.loads(FIELDS.read_text())) == names


@by_name
def test_samples_leave_no_field_at_its_default(sample: msgspec.Struct) -> None:
    for field in msgspec.structs.fields(sample):
        if not field.required and type(sample).__name__ not in ("Prompt",):
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            assert getattr(sample, field.name) != default, field.name


@by_name
def test_stored_bytes_are_read(sample: msgspec.Struct) -> None:
    stored = (GOLDEN / f"{type(sample).__name__}.msgpack").read_bytes()
    read: Any = msgspec.msgpack.decode(stored, type=type(sample))
    num_stored = len(json.loads(FIELDS.read_text())[type(sample).__name__])
    for field in msgspec.structs.fields(sample)[:num_stored]:
        assert getattr(read, field.name) == getattr(sample, field.name), field.name


@by_name
def test_what_is_written_today_begins_with_the_stored_bytes(sample: msgspec.Struct) -> None:
    stored = msgspec.msgpack.decode((GOLDEN / f"{type(sample).__name__}.msgpack").read_bytes())
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    assert begins_with(written, stored)


def begins_with(written: Any, stored: Any) -> bool:
    """Whether a struct, and each one inside it, is the stored one or has grown at its end."""
    if not isinstance(stored, list):
        return bool(written == stored)
    return isinstance(written, list) and len(written) >= len(stored) and all(map(begins_with, written, stored))


@by_name
def test_structs_only_grow_at_the_end_and_with_defaults(sample: msgspec.Struct) -> None:
    kind = type(sample)
    stored = json.loads(FIELDS.read_text())[kind.__name__]
    assert shape(kind)[: len(stored)] == stored, "a field was renamed, retyped, reordered or removed"
    assert not [f.name for f in msgspec.structs.fields(kind)[len(stored) :] if f.required], (
        "a new field needs a default"
    )


@by_name
def test_a_reader_passes_over_fields_of_a_later_version(sample: msgspec.Struct) -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    longer = msgspec.msgpack.encode([*raw, "from the future", 1])
    assert msgspec.msgpack.decode(longer, type=type(sample)) == sample


def test_the_wrong_kind_is_named() -> None:
    step = next(s for s in SAMPLES if isinstance(s, StepChunk))
    with pytest.raises(WireError, match="not a Delta"):
        decode(Delta, encode(step))


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02", b"\x80", b"\x91\xa5delta"])
def test_garbage_is_a_wire_error(garbage: bytes) -> None:
    with pytest.raises(WireError):
        decode(Delta, garbage)


def test_the_page_of_messages_names_every_struct_and_field() -> None:
    page = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    for name, kind in structs().items():
        _, found, rest = page.partition(f"## {name}\n")
        assert found, f"docs/messages.md has no section {name}"
        section = rest.partition("\n## ")[0]
        told = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        assert told == [f.name for f in msgspec.structs.fields(kind)], f"docs/messages.md, {name}"
    sections = {line[3:] for line in page.splitlines() if line.startswith("## ") and line[3:].isidentifier()}
    assert sections <= set(structs()), "docs/messages.md describes a struct that is not there"


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in structs().values() if issubclass(kind, Message)]
    assert len(tags) == len(set(tags))
