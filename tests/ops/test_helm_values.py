"""The writer of the chart's schema and table: what it reads from comments, and what it does not let pass."""

import jsonschema
import pytest

from tools.helm_values import entries, schema, table

VALUES = """\
# About the file; `# --` explains nothing here.

# -- How many.
# @schema {"minimum": 1}
count: 2
group:
  # -- A name,
  # on two lines.
  name: "a|b"
  # -- Anything.
  free:
    # A remark.
    inner: {deep: 1}
modelDefaults:
  # -- Of an engine.
  # @settings scheduler
  settings: {}
"""


def test_what_is_explained_is_a_row() -> None:
    found = {".".join(e.path): e.text for e in entries(VALUES)}
    assert found == {
        "count": "How many.",
        "group.name": "A name, on two lines.",
        "group.free": "Anything.",
        "modelDefaults.settings": "Of an engine.",
    }
    assert '| `group.name` | `"a\\|b"` | A name, on two lines. |\n' in table(VALUES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 0}, "less than the minimum of 1"),
        ({"count": "2"}, "is not of type 'integer'"),
        ({"group": {"nme": "x"}}, "'nme' was unexpected"),
        ({"modelDefaults": {"settings": {"dtype": "int8"}}}, "'int8' is not one of"),
        ({"modelDefaults": {"settings": {"maxSeqLength": 1}}}, "'maxSeqLength' was unexpected"),
    ],
)
def test_the_schema_refuses(values: object, said: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(values, schema(VALUES))


def test_the_schema_takes_what_is_right() -> None:
    right = {"count": 1, "group": {"free": {"any": []}}, "modelDefaults": {"settings": {"maxSeqLen": 4096}}}
    jsonschema.validate(right, schema(VALUES))


def test_a_key_that_nobody_explained_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"values.yaml: group.more is not explained"):
        schema(VALUES.replace("group:\n", "group:\n  more: 1\n"))
