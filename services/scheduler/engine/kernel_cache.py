"""Where compiled kernels are kept: Triton's cache in a folder of ours, and what a start found there or had to compile.

With a folder that `python -m services.launcher warmup` has filled, a start needs no compiler. Kernels belong to a
kind of GPU, a version of Triton and the settings that shape them; the folder may hold those of many. Knows no model.
"""

import logging
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from shared.errors import ConfigError

log = logging.getLogger(__name__)

_TRITON_FOLDER: Final = "TRITON_CACHE_DIR"
WARM_UP: Final = "python -m services.launcher warmup"


@dataclass(slots=True)
class KernelCache:
    """A folder of compiled kernels, and what this process has done with it.

    Attributes:
        folder: where they lie.
        compiled: names of kernels that this process compiled -> how many forms of each.
        found: likewise, of those that were there.
        compile_s: seconds that compiling took.
    """

    folder: Path
    compiled: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    compile_s: float = 0.0
    serves: bool = False

    def size(self) -> tuple[int, int]:
        """Kernels in the folder, whoever compiled them, and the bytes of all its files."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return sum(path.suffix == ".cubin" for path in files), sum(path.stat().st_size for path in files)

    def listen(self) -> None:
        """Have Triton tell of each kernel that this process comes to use."""
        from triton import knobs

        knobs.compilation.listener = self._note

    def _note(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        name = str(metadata.get("name") or getattr(src, "name", "a kernel"))
        if cache_hit:
            self.found[name] += 1
            return
        self.compiled[name] += 1
        seconds = times.total / 1e6
        self.compile_s += seconds
        if self.serves:
            log.warning("kernel %s was compiled while serving, in %.1f s: its step waited", name, seconds)


def kernel_folder(setting: Path | None) -> Path:
    """Find the folder: the setting, then Triton's own variable, then the user's cache."""
    if setting is not None:
        return setting
    if given := os.environ.get(_TRITON_FOLDER):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "millrace" / "kernels"


def inherited_folder() -> Path:
    """Find the folder that the process which started this one uses: the one it has set, or Triton's own."""
    return Path(os.environ.get(_TRITON_FOLDER) or "~/.triton/cache").expanduser()


def use_folder(folder: Path) -> KernelCache:
    """Have this process and its children keep compiled kernels in a folder; to be called before the first.

    Raises:
        ConfigError: there is no such folder, and it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"MILLRACE_KERNEL_CACHE_DIR: {folder} cannot be made: {e.strerror}") from e
    os.environ[_TRITON_FOLDER] = str(folder.absolute())
    return KernelCache(folder.absolute())


@contextmanager
def kept_kernels(setting: Path | None, device: str) -> Iterator[KernelCache | None]:
    """Start an engine with kernels from a folder, and say afterwards what came from there. Nothing without a GPU.

    Args:
        setting: the folder; None takes the default.
        device: what the engine is to run on, as the setting names it.

    Raises:
        ConfigError: the folder cannot be used, or a kernel is missing there and nothing can compile it.
    """
    if device == "cpu" or not torch.cuda.is_available():
        yield None
        return
    cache = use_folder(kernel_folder(setting))
    cache.listen()
    try:
        yield cache
    except Exception as e:
        if _cannot_compile(cache.folder, e):
            raise ConfigError(_advice(cache.folder, e)) from e
        raise
    cache.serves = True
    _tell(cache)


def _tell(cache: KernelCache) -> None:
    found, compiled = cache.found.total(), cache.compiled.total()
    if compiled:
        log.info(
            "kernels: %d compiled in %.1f s, %d found in %s; `%s` compiles them ahead of a start",
            compiled, cache.compile_s, found, cache.folder, WARM_UP,
        )  # fmt: skip
    elif found:
        log.info("kernels: all %d found in %s", found, cache.folder)


def _advice(folder: Path, error: BaseException) -> str:
    return (
        f"a kernel is not in {folder}, and cannot be compiled here ({_cannot_compile(folder, error)}): fill that "
        f"folder with `{WARM_UP}` and the same settings, on the same kind of GPU with the same version, where there is "
        "a C compiler with Python's headers; or install these"
    )


def _cannot_compile(folder: Path, error: BaseException) -> str:
    """Say what compiling lacks (a compiler, or a folder to write to), if something failed for that; else nothing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, subprocess.CalledProcessError) and "-shared" in map(str, seen.cmd):
            return f"{seen.cmd[0]} ended with {seen.returncode}"
        if isinstance(seen, FileNotFoundError | PermissionError) and str(seen.filename) == os.environ.get("CC"):
            return f"CC is {seen.filename}: {seen.strerror}"
        if isinstance(seen, OSError) and seen.filename and Path(str(seen.filename)).is_relative_to(folder):
            return f"{folder} cannot be written: {seen.strerror}"
        if isinstance(seen, RuntimeError) and "Failed to find C compiler" in str(seen):
            return "there is no C compiler"
        seen = seen.__cause__ or seen.__context__
    return ""
