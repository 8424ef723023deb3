"""`dead list | show | replay | drop`: what to do with requests and messages that were given up.

A letter says why something was given up; whether it also holds the request is a setting of the service that
wrote it. Prints sizes and parameters, never the text of a prompt or of an answer.
"""

import argparse
import json
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from shared.broker.connection import Broker
from shared.broker.control import look
from shared.broker.dead_letters import drop_dead, list_dead
from shared.broker.log_id import split_log_id
from shared.broker.replies import EndEntry, read_log
from shared.broker.streams import Choice, open_request
from shared.errors import WireError
from shared.ids import new_incarnation, new_uid
from shared.messages import DeadLetter, GenerateRequest, Heartbeat, Prompt, ReplyHeader, TokenizeRequest, decode
from shared.settings import RedisSettings

EXIT_NOT_DONE: Final = 1
_KEPT_MS: Final = 600_000
_REPLAY_LIMIT_S: Final = 120.0
_LOOK_S: Final = 0.1

Letters = Sequence[tuple[str, DeadLetter]]


def run(settings: RedisSettings, args: argparse.Namespace) -> int:
    """Run one action and give its exit code.

    Raises:
        BrokerError: the broker cannot be used.
    """
    with Broker(settings, name="millrace-dead") as broker:
        letters = [(entry_id.decode(), letter) for entry_id, letter in broker.run(list_dead(broker.keys))]
        if args.action == "list":
            return _list(letters)
        chosen = [(i, letter) for i, letter in letters if args.id in (i, letter.uid) or args.id == "all"]
        if not chosen:
            print(f"no letter {args.id}")
            return EXIT_NOT_DONE
        if args.action == "show":
            return _show(chosen)
        if args.action == "drop":
            print(f"dropped {broker.run(drop_dead(broker.keys, [i.encode() for i, _ in chosen]))}")
            return 0
        return max(_replay(broker, entry_id, letter) for entry_id, letter in chosen)


def _list(letters: Letters) -> int:
    """Print one line per letter, the newest first."""
    for entry_id, letter in letters:
        holds = f"{len(letter.body)} bytes" if letter.body else "no body"
        print(
            "  ".join(
                (entry_id, _when(letter), letter.source, f"tries {letter.tries}", holds, letter.uid, letter.reason)
            )
        )
    print(f"{len(letters)} {'letter' if len(letters) == 1 else 'letters'}")
    return 0


def _show(letters: Letters) -> int:
    """Print all there is of some letters, as JSON."""
    for entry_id, letter in letters:
        shown = {
            "id": entry_id,
            "uid": letter.uid,
            "at": _when(letter),
            "source": letter.source,
            "reason": letter.reason,
            "tries": letter.tries,
            "body": _describe(letter.body),
        }
        print(json.dumps(shown, indent=2))
    return 0


def _describe(body: bytes) -> object:
    """Say what a body is, without its text."""
    match _request_of(body):
        case GenerateRequest() as request:
            return {
                "kind": "generate",
                "prompt_tokens": len(request.prompt_ids),
                "params": msgspec.to_builtins(request.params, str_keys=True),
                "request_id": request.request_id,
                "tenant": request.tenant,
            }
        case TokenizeRequest() as request:
            return {
                "kind": "tokenize",
                "prompts": len(request.prompts),
                "choices": len(request.uids),
                "model": request.model,
                "request_id": request.request_id,
                "tenant": request.tenant,
            }
        case None:
            return f"{len(body)} bytes that are no request" if body else None


def _request_of(body: bytes) -> GenerateRequest | TokenizeRequest | None:
    """Read the request in a body, if it is one."""
    try:
        return decode(GenerateRequest, body)
    except WireError:
        pass  # the other kind, or none at all
    try:
        return decode(TokenizeRequest, body)
    except WireError:
        return None


def _replay(broker: Broker, entry_id: str, letter: DeadLetter) -> int:
    """Send a request again, wait for its end, and drop the letter if that was a good one."""
    request = _request_of(letter.body)
    if request is None:
        print(f"{entry_id}: holds no request, so it cannot be sent again")
        return EXIT_NOT_DONE
    again = _again(request, _model_of(broker, request))
    if again is None:
        print(f"{entry_id}: no engine is registered, or several models are")
        return EXIT_NOT_DONE
    replica = new_incarnation("replay")
    choices = [
        Choice(uid, ReplyHeader(replica=replica, resumable_ms=_KEPT_MS, request_id=again.request_id, index=index))
        for index, uid in enumerate(again.uids)
    ]
    broker.run(open_request(broker.keys, again, choices, cap=None))
    results = [_outcome(broker, uid) for uid in again.uids]
    for uid, (_, text) in zip(again.uids, results, strict=True):
        print(f"{entry_id}: sent again as {uid}: {text}")
    if not all(good for good, _ in results):
        return EXIT_NOT_DONE
    broker.run(drop_dead(broker.keys, [entry_id.encode()]))
    return 0


def _model_of(broker: Broker, request: GenerateRequest | TokenizeRequest) -> str | None:
    """Name the model of a request; one that was tokenized already belongs to the only model there is."""
    if isinstance(request, TokenizeRequest):
        return request.model
    beats = broker.run(look(broker.keys, "scheduler")).values()
    models = {decode(Heartbeat, beat).model for beat in beats}
    return models.pop() if len(models) == 1 else None


def _again(request: GenerateRequest | TokenizeRequest, model: str | None) -> TokenizeRequest | None:
    """Make the request new: under other uids, as of now."""
    if model is None:
        return None
    now_ms = time.time_ns() // 1_000_000
    if isinstance(request, TokenizeRequest):
        return msgspec.structs.replace(request, uids=[new_uid() for _ in request.uids], arrival_ms=now_ms)
    return TokenizeRequest(
        uids=[new_uid()],
        prompts=[Prompt(token_ids=request.prompt_ids)],
        n=1,
        seeds=[request.params.seed],
        params=request.params,
        model=model,
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        arrival_ms=now_ms,
        cache_salt=request.cache_salt,
    )


def _outcome(broker: Broker, uid: str) -> tuple[bool, str]:
    """Wait for the end of a uid; say whether it was a good one, and what it was."""
    pause = threading.Event()
    deadline_s = time.monotonic() + _REPLAY_LIMIT_S
    while time.monotonic() < deadline_s:
        entries = broker.run(read_log(broker.keys, uid))
        if entries and isinstance(entries[-1], EndEntry):
            end = entries[-1]
            said = split_log_id(end.log_id)[1]
            if end.delta.error is not None:
                return False, f"failed after {said} tokens: {end.delta.error.message}"
            return True, f"{end.delta.finish} after {said} tokens"
        pause.wait(_LOOK_S)
    return False, f"no end within {_REPLAY_LIMIT_S:.0f} s"


def _when(letter: DeadLetter) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.at_ms / 1000))
