"""Compiled kernels lie in one folder, are found there again, and a missing compiler is told with the way out."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from services.scheduler.engine import kernel_cache
from services.scheduler.engine.kernel_cache import inherited_folder, kept_kernels, kernel_folder, use_folder
from shared.errors import ConfigError
from tests.engine.kernels.test_compile import SETUP
from tests.engine.snippets import run_snippet


def test_the_folder_is_the_setting_then_tritons_then_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    assert kernel_folder(tmp_path) == tmp_path
    assert kernel_folder(None) == Path("/cache/triton")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_folder(None) == tmp_path / "millrace" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_folder(None) == tmp_path / ".cache" / "millrace" / "kernels"


def test_a_rank_takes_the_folder_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert inherited_folder() == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inherited_folder() == tmp_path / ".triton" / "cache"


def test_children_get_the_folder_and_a_bad_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    cache = use_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and cache.folder == tmp_path / "a" / "b"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"MILLRACE_KERNEL_CACHE_DIR: .*/file/c cannot be made: Not a directory"):
        use_folder(tmp_path / "file" / "c")


def test_nothing_happens_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "as it was")
    with kept_kernels(tmp_path / "kernels", "cpu") as cache:
        assert cache is None
    assert os.environ["TRITON_CACHE_DIR"] == "as it was" and not (tmp_path / "kernels").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "there is no C compiler"),
        (subprocess.CalledProcessError(1, ["/bin/false", "x.c", "-O3", "-shared"]), "/bin/false ended with 1"),
        (
            FileNotFoundError(2, "No such file or directory", "no-such-cc"),
            "CC is no-such-cc: No such file or directory",
        ),
        (OSError(30, "Read-only file system", "FOLDER/ab12"), "cannot be written: Read-only file system"),
    ],
)
def test_a_missing_compiler_is_told_with_the_way_out(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("CC", "no-such-cc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_cache.KernelCache, "listen", lambda self: None)
    if isinstance(error, OSError):
        error.filename = str(error.filename).replace("FOLDER", str(tmp_path))
    with pytest.raises(ConfigError) as raised, kept_kernels(tmp_path, "auto"):
        raise RuntimeError("a step failed") from error
    assert words in str(raised.value) and "`python -m services.launcher warmup`" in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    with pytest.raises(ValueError, match="another"), kept_kernels(tmp_path, "cuda"):
        raise ValueError("another fault")


def test_kernels_are_compiled_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    code = """
        import logging, pathlib
        logging.basicConfig(level="INFO", format="%(message)s")
        torch.cuda.is_available = lambda: True
        from services.scheduler.engine.kernel_cache import kept_kernels
        from services.scheduler.engine.kernels.elementwise import silu_mul
        with kept_kernels(pathlib.Path(sys.argv[1]), "auto") as cache:
            silu_mul(torch.zeros(3, 64))
            silu_mul(torch.zeros(3, 64).bfloat16())
        assert set(cache.compiled + cache.found) == {"_silu_kernel"}
        print(cache.compiled.total(), cache.found.total(), cache.size()[0], cache.size()[1] > 9999, cache.compile_s > 0)
        silu_mul(torch.zeros(3, 80).half())
    """
    outputs = []
    for _ in range(2):
        run = run_snippet(code, tmp_path, setup="import sys" + SETUP, interpreted=False)
        outputs.append((run.stdout.strip(), run.stderr))
    first, second = outputs
    assert first[0] == "2 0 2 True True" and second[0] == "0 2 3 True False"
    assert "kernels: 2 compiled in " in first[1] and "`python -m services.launcher warmup`" in first[1]
    assert f"kernels: all 2 found in {tmp_path}" in second[1]
    assert "kernel _silu_kernel was compiled while serving, in " in first[1]
    assert "while serving" not in second[1]
