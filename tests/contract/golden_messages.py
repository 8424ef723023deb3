"""One full sample of every wire struct, and the files that hold its bytes: `golden/<Name>.msgpack`.

`python -m tests.contract.golden_messages` writes what is missing. It never rewrites a file: bytes that were once
on the wire stay readable. A new version of the wire starts a new folder.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from shared import dialect, messages
from shared.dialect import CallShapes, Dialect, FunctionShape, Outline, Thoughts
from shared.messages import (
    DeadLetter,
    Delta,
    ErrorBody,
    FenceHeader,
    GenerateRequest,
    Heartbeat,
    LogprobEntry,
    Message,
    Prompt,
    ReplyHeader,
    Said,
    StepChunk,
    TokenizeRequest,
)
from shared.sampling import Grammar, SamplingParams

GOLDEN = Path(__file__).with_name("golden")
FIELDS = GOLDEN / "fields.json"

UID, OTHER_UID = "0193d1f0a1b2" + "0" * 20, "0193d1f0a1b3" + "f" * 20

THOUGHTS = Thoughts(open="<think>", close="</think>", close_id=151_668, begun=True)
OUTLINE = Outline(tools="hermes", functions=["f"], parallel=False, thoughts=THOUGHTS)
DIALECT = Dialect(tools="hermes", thoughts=THOUGHTS, openings=("begun", "begun", "never"))
SHAPE = FunctionShape(name="f", schema="{}", strict=True, field="tools.0.function.parameters")
CALLS = CallShapes(tools="hermes", functions=[SHAPE], parallel=False, free=True)
GRAMMAR = Grammar(
    kind="json_schema", text='{"type":"object"}', lenient=True, field="regex", thoughts=THOUGHTS, calls=CALLS
)
PARAMS = SamplingParams(
    max_tokens=12,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=-7,
    presence_penalty=0.25,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    logit_bias={2: -100.0, 17: 5.0},
    logprobs=3,
    min_tokens=1,
    stop_token_ids=[5, 6],
    ignore_eos=True,
    prompt_logprobs=2,
    returns_prompt=True,
    grammar=msgspec.structs.replace(GRAMMAR, thoughts=None, calls=None),
)
ERROR = ErrorBody(status=500, message="launched 3 times", type="server_error", code="poison", param="messages")
LOGPROB = LogprobEntry(token_id=9, logprob=-0.25, token=b"\xe2\x82", top=[(9, -0.25, b"\xe2\x82"), (4, -1.5, b"a")])

SAMPLES: list[msgspec.Struct] = [
    THOUGHTS,
    OUTLINE,
    DIALECT,
    SHAPE,
    CALLS,
    GRAMMAR,
    PARAMS,
    ERROR,
    LOGPROB,
    Prompt(text="a", token_ids=[1, 2], messages=[{"role": "user", "content": "hi"}]),
    TokenizeRequest(
        uids=[UID, OTHER_UID],
        prompts=[Prompt(text="one"), Prompt(token_ids=[1, 2, 3])],
        n=1,
        seeds=[1, -(2**63)],
        params=PARAMS,
        model="m/x",
        request_id="req-1",
        tenant="team",
        priority=-2,
        arrival_ms=1_800_000_000_000,
        tools=[{"type": "function", "function": {"name": "f"}}],
        template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        cache_salt="salt",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        purpose="tokenize",
        add_special=False,
        default_limit=True,
    ),
    GenerateRequest(
        uid=UID,
        prompt_ids=[1, 2, 70_000],
        params=PARAMS,
        request_id="req-1",
        tenant="team",
        priority=3,
        arrival_ms=1_800_000_000_000,
        cache_salt="salt",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    StepChunk(
        engine="scheduler-0-1a2b3c4d",
        stamp_ns=1_800_000_000_000_000_000,
        uids=[UID, OTHER_UID],
        attempts=[1_800_000_000_000, 1_800_000_000_001],
        firsts=[1, 5],
        tokens=[9, 10, 11],
        counts=[1, 2],
        finishes={1: "length"},
        starts={0: (31, 16)},
        logprobs={0: [LogprobEntry(token_id=9, logprob=-0.5)]},
        prompts={0: [LogprobEntry(token_id=7, logprob=0.0), LogprobEntry(token_id=8, logprob=-1.5)]},
        complete=[1],
    ),
    ReplyHeader(
        replica="api-0-1a2b3c4d",
        stop=["\n\n", "END"],
        include_stop=True,
        skip_special=False,
        key_hash="ab12",
        resumable_ms=60_000,
        request_id="req-1",
        index=1,
        outline=OUTLINE,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    FenceHeader(engine="scheduler-0-1a2b3c4d", entry="1-0", prompt_tokens=31, prompt_tail=[7, 8]),
    Said([9, 10], "of a mill", logprobs=[LOGPROB], prompt_tokens=31, cached_tokens=16, prompt=[LOGPROB]),
    Delta(
        first=3,
        token_ids=[9, 10],
        text="stream",
        logprobs=[LOGPROB],
        finish="stop",
        error=ERROR,
        prompt_tokens=31,
        cached_tokens=16,
        stamp_ns=1_800_000_000_000_000_000,
        prompt=[LogprobEntry(token_id=7, logprob=0.0, token=b"a")],
    ),
    Heartbeat(
        beat=7,
        name="scheduler-0",
        version="0.1.0",
        model="m/x",
        draining=True,
        port=9102,
        fingerprint="f00d",
        max_seq_len=8192,
        num_running=3,
        num_waiting=4,
        queued_tokens=500,
        max_running=64,
        free_pages=90,
        num_pages=100,
        page_size=16,
        tokens_per_s=123.5,
        cached_pages=40,
        cache_query_tokens=9000,
        cache_hit_tokens=6000,
        num_taken=2,
        num_said=1234,
        ttft_counts=[0, 3, 1],
        gap_counts=[700, 20, 1],
        dialect=DIALECT,
        birth="b1",
        ended=True,
        num_resumed=5,
    ),
    DeadLetter(uid=UID, reason="poison", tries=3, source="scheduler-0", at_ms=1_800_000_000_000, body=b"\x93\x01"),
]


def structs() -> dict[str, type[msgspec.Struct]]:
    """Name every struct that crosses a process boundary."""
    kinds = {name: value for name, value in vars(messages).items() if isinstance(value, type)}
    wire = {name: kind for name, kind in kinds.items() if issubclass(kind, Message) and kind is not Message}
    spoken = {
        name: kind
        for name, kind in vars(dialect).items()
        if isinstance(kind, type) and kind.__module__ == dialect.__name__
    }
    return {"Grammar": Grammar, "SamplingParams": SamplingParams, **spoken, **wire}


def shape(kind: type[msgspec.Struct]) -> list[list[Any]]:
    """Describe a struct's fields in order: name and type."""
    return [
        [f.name, str(f.type) if not isinstance(f.type, type) else f.type.__name__] for f in msgspec.structs.fields(kind)
    ]


def write_missing() -> None:
    """Write the bytes and the shape of every struct that has none yet."""
    shapes = json.loads(FIELDS.read_text()) if FIELDS.exists() else {}
    for sample in SAMPLES:
        name = type(sample).__name__
        path = GOLDEN / f"{name}.msgpack"
        if not path.exists():
            path.write_bytes(msgspec.msgpack.encode(sample))
        shapes.setdefault(name, shape(type(sample)))
    FIELDS.write_text(json.dumps(shapes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_missing()
