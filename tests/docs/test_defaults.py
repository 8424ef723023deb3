"""Numbers in the pages that are settings or constants of the code: what is said is what holds."""

import re
from typing import Final

import pytest
import yaml

from services.api.admission import MAX_ASKED
from services.api.limits import ANSWER_GUESS
from services.api.schema import MAX_MESSAGES, MAX_STOP
from services.api.settings import ApiSettings
from services.api.tokenizing import DEADLINE_S
from services.scheduler.grammar.compiler import MAX_COMPILE_S
from services.scheduler.settings import SchedulerSettings
from shared.broker.replies import MAX_LAUNCHES
from shared.dialect import MAX_FUNCTIONS
from shared.keys import LEASE_S, NUM_SHARDS, SLOT_TTL_MS, SUCCEEDED_S
from shared.sampling import MAX_GRAMMAR_BYTES
from tests.docs.pages import ROOT, rows, text_of

API: Final = ApiSettings.model_construct()
ENGINE: Final = SchedulerSettings.model_construct()
WORDS: Final = {1: "one", 2: "two", 3: "three", 4: "four"}
SAID: Final = [
    ("README.md", f"after {WORDS[MAX_LAUNCHES]} launches"),
    ("docs/api.md", f"for {API.resume_for:g} s (`--resume-for`)"),
    ("docs/api.md", f"at most {MAX_STOP} `stop` texts"),
    ("docs/api.md", f"({ANSWER_GUESS} where it names none)"),
    ("docs/api.md", f"of a replica that died is free after {SLOT_TTL_MS // 1000} s"),
    ("docs/api.md", f"{API.max_tokenize_bytes >> 20} MiB (`MILLRACE_MAX_TOKENIZE_BYTES`)"),
    ("docs/api.md", f"At most {MAX_ASKED} such requests are under way per replica, each for at most {DEADLINE_S:g} s"),
    ("docs/api.md", f"A head has {API.max_header_bytes >> 10} KiB and {API.header_timeout:g} s ("),
    ("docs/api.md", f"a body {API.max_body_bytes >> 20} MiB and {API.body_timeout:g} s ("),
    ("docs/api.md", f"{API.max_json_depth} levels (`MILLRACE_MAX_JSON_DEPTH`)"),
    ("docs/api.md", f"a conversation {MAX_MESSAGES:,} messages, a request {API.max_choices:,} choices"),
    ("docs/architecture.md", f"at most {MAX_STOP} stop strings"),
    ("docs/operations.md", f"up to {NUM_SHARDS} replicas per model"),
    ("docs/operations.md", f"launched {WORDS[MAX_LAUNCHES]} times"),
    ("docs/promises.md", f"the lease, {ENGINE.lease:g} s (`--lease`)"),
    ("docs/promises.md", f"within its lease, {LEASE_S['api']:g} s, or {SUCCEEDED_S:g} s when a successor"),
    ("docs/promises.md", f"{API.reopen_after:g} s (`MILLRACE_REOPEN_AFTER`)"),
    ("docs/promises.md", f"{API.no_engine_timeout:g} s without an engine"),
    ("docs/promises.md", f"launched {WORDS[MAX_LAUNCHES]} times"),
    ("docs/structured.md", f"At most {MAX_GRAMMAR_BYTES >> 10} KiB of text, {MAX_COMPILE_S:g} s of compiling"),
    ("docs/tools.md", f"At most {MAX_FUNCTIONS} tools"),
]
"""Page, and the words it must have."""


@pytest.mark.parametrize(("page", "words"), SAID)
def test_a_page_says_what_holds(page: str, words: str) -> None:
    assert words in re.sub(r"\s+", " ", text_of(page))


def test_defaults_of_compose_are_the_ones_of_its_files() -> None:
    files = "".join(path.read_text("utf-8") for path in ROOT.glob("docker-compose*.yml"))
    checked = 0
    for names, said, *_ in rows("docs/containers.md", "Settings"):
        variables, values = re.findall(r"`([A-Z_]+)`", names), said.split(", ")
        for name, value in zip(variables, values * len(variables) if len(values) == 1 else values, strict=True):
            defaults = set(re.findall(rf"\$\{{{name}:-([^}}]*)\}}", files))
            if value.startswith("`"):
                assert value.strip("`") in defaults, f"{name}: {value} is said, {defaults} holds"
                checked += 1
    assert checked >= 12


def test_ports_of_the_containers_are_the_ones_said() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    for cells in rows("docs/containers.md", "What runs"):
        for port in re.findall(r"`/readyz` on (\d+)", cells[3]):
            (name,) = re.findall(r"`(\w+)`", cells[0])
            assert re.search(rf"\b{port}\b", yaml.safe_dump(services[name])), f"{name} and {port}"
