"""Dead letters on the command line: what is shown, what is never shown, and what is deleted."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.launcher import dead
from services.launcher.joining import needed_broker
from services.launcher.settings import LauncherSettings
from shared.broker.connection import Broker
from shared.broker.dead_letters import bury, list_dead
from shared.errors import Unavailable
from shared.ids import new_uid
from shared.messages import DeadLetter, GenerateRequest, Prompt, TokenizeRequest, encode
from shared.sampling import SamplingParams
from shared.settings import RedisSettings

Act = Callable[..., tuple[int, str]]
SECRET = "the text of a prompt"
WHOLE = TokenizeRequest(
    uids=[new_uid()], prompts=[Prompt(text=SECRET)], n=1, seeds=[1], params=SamplingParams(), model="m", tenant="team"
)
ONE = GenerateRequest(uid=new_uid(), prompt_ids=[7, 8, 9], params=SamplingParams(max_tokens=5), request_id="req-9")


def letter(body: bytes = b"", reason: str = "poison") -> DeadLetter:
    return DeadLetter(new_uid(), reason, 3, "scheduler-0", 1_800_000_000_000, body)


@pytest.fixture
def act(redis_settings: RedisSettings, capsys: pytest.CaptureFixture[str]) -> Act:
    """Run an action; give its exit code and what it printed."""

    def run(action: str, which: str = "") -> tuple[int, str]:
        code = dead.run(redis_settings, argparse.Namespace(action=action, id=which))
        return code, capsys.readouterr().out

    return run


def test_without_a_launcher_and_a_broker_both_are_asked_for(tmp_path: Path) -> None:
    nobody = LauncherSettings(run_dir=tmp_path / "nobody")
    with pytest.raises(Unavailable, match=r"no launcher runs in /.*/nobody .*--redis-url"):
        needed_broker(nobody)
    given = LauncherSettings(run_dir=tmp_path, redis_url="redis://elsewhere:1/0")
    assert needed_broker(given) is given


def test_one_letter_is_one(act: Act, broker: Broker) -> None:
    broker.run(bury(broker.keys, letter()))
    assert act("list")[1].splitlines()[-1] == "1 letter"


def test_an_empty_box_is_listed(act: Act) -> None:
    assert act("list") == (0, "0 letters\n")


def test_letters_are_listed_the_newest_first(act: Act, broker: Broker) -> None:
    first, second = letter(), letter(encode(ONE), "crash")
    broker.run_many([bury(broker.keys, first), bury(broker.keys, second)])
    code, out = act("list")
    lines = out.splitlines()
    assert code == 0
    assert second.uid in lines[0] and "crash" in lines[0] and "bytes" in lines[0]
    assert first.uid in lines[1] and "no body" in lines[1] and "tries 3" in lines[1]
    assert lines[2] == "2 letters"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (encode(ONE), {"kind": "generate", "prompt_tokens": 3, "request_id": "req-9"}),
        (encode(WHOLE), {"kind": "tokenize", "prompts": 1, "choices": 1, "model": "m", "tenant": "team"}),
    ],
)
def test_a_letter_is_shown_without_its_text(act: Act, broker: Broker, body: bytes, shown: dict[str, object]) -> None:
    buried = letter(body)
    broker.run(bury(broker.keys, buried))
    code, out = act("show", buried.uid)
    assert code == 0
    assert SECRET not in out
    told = json.loads(out)
    assert told["reason"] == "poison"
    assert shown.items() <= told["body"].items()


def test_a_letter_that_holds_something_else_says_so(act: Act, broker: Broker) -> None:
    broker.run(bury(broker.keys, letter(b"\xc1")))
    assert json.loads(act("show", "all")[1])["body"] == "1 bytes that are no request"
    code, out = act("replay", "all")
    assert code == dead.EXIT_NOT_DONE
    assert "cannot be sent again" in out
    assert len(broker.run(list_dead(broker.keys))) == 1


def test_one_letter_is_dropped_and_then_all(act: Act, broker: Broker) -> None:
    letters = [letter() for _ in range(3)]
    broker.run_many([bury(broker.keys, each) for each in letters])
    assert act("drop", letters[1].uid) == (0, "dropped 1\n")
    assert {each.uid for _, each in broker.run(list_dead(broker.keys))} == {letters[0].uid, letters[2].uid}
    assert act("drop", "all") == (0, "dropped 2\n")
    assert act("drop", "all") == (dead.EXIT_NOT_DONE, "no letter all\n")


def test_a_request_without_an_engine_is_not_sent_again(act: Act, broker: Broker) -> None:
    broker.run(bury(broker.keys, letter(encode(ONE))))
    code, out = act("replay", "all")
    assert code == dead.EXIT_NOT_DONE
    assert "no engine is registered" in out
    assert len(broker.run(list_dead(broker.keys))) == 1
