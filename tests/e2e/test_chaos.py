"""A short run of chaos: every kind of fault once or nearly so, on the whole stack under load; nothing is lost."""

import subprocess
import sys

import pytest

from bench.chaos.schedule import plan
from tests.e2e.stack import ROOT

SEED = 5
NUM_FAULTS = 22


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_under_faults_of_every_kind() -> None:
    words = f"--seed {SEED} --brief --faults {NUM_FAULTS} --requests {NUM_FAULTS * 8} --log /dev/null".split()
    command = [sys.executable, "-m", "bench.chaos", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=380, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "indices missing                0\n" in done.stdout
    assert f"accepted                       {NUM_FAULTS * 8}\n" in done.stdout


def test_a_schedule_is_a_function_of_its_seed_and_leaves_no_kind_out() -> None:
    assert plan(7, 100) == plan(7, 100) != plan(8, 100)
    kinds = {fault.name for fault in plan(7, 100)}
    assert kinds >= {f"{kind} {role}" for kind in ("kill", "drain", "stop", "pause") for role in ("api", "scheduler")}
    assert kinds >= {"redis kill", "redis wipe", "latency redis", "cut redis", "leave", "slow readers", "poison", "nan"}
    assert {fault.name for fault in plan(7, 3, only="redis w")} == {"redis wipe"}
    with pytest.raises(ValueError, match="no fault"):
        plan(7, 3, only="no such thing")
