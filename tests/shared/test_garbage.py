"""The collector has little to look at: messages are out of its sight, and what was loaded is frozen."""

import gc
import subprocess
import sys

from shared.messages import Delta, Message, decode, encode


def test_no_message_is_tracked() -> None:
    kinds = Message.__subclasses__()
    assert len(kinds) > 10
    assert [kind for kind in kinds if kind.__struct_config__.gc] == []
    assert not gc.is_tracked(decode(Delta, encode(Delta(1, [2], "x"))))


def test_what_is_loaded_is_left_out_and_collections_are_rarer() -> None:
    code = (
        "import gc; from shared import garbage; garbage.settle(); print(gc.get_freeze_count(), gc.get_threshold()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    frozen, threshold = map(int, done.stdout.split())
    assert frozen > 1000
    assert threshold > 1000
