"""What `warmup` says of the kernels that it has compiled, and of those that other ranks have."""

from collections import Counter
from pathlib import Path

import pytest

from services.launcher.warmup import _tell
from services.scheduler.engine.kernel_cache import KernelCache


@pytest.mark.parametrize(
    ("compiled", "had", "ranks", "words"),
    [
        (2, 0, 1, ["compiled 2 kernels in 1.5 s of 9.0 s, 1 were there:", "_a, 2 forms", "holds 3 kernels, 0.0 MB"]),
        (2, 0, 2, ["compiled 2 kernels in 1.5 s of 9.0 s", "holds 3 kernels (3 of them new, for 2 ranks), 0.0 MB"]),
        (0, 1, 2, ["the other ranks compiled 2 kernels in 9.0 s; all 1 of rank 0 were there"]),
        (0, 3, 2, ["nothing to compile: all 1 kernels were there", "holds 3 kernels (0 of them new, for 2 ranks)"]),
    ],
)
def test_it_counts_what_the_folder_has_gained(
    compiled: int, had: int, ranks: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.cubin").write_text(name)
    cache = KernelCache(tmp_path, Counter({"_a": compiled} if compiled else {}), Counter(_b=1), 1.5)
    _tell(cache, had, ranks, 9.0)
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert all(each in said for each in words), said
