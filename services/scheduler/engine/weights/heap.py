"""Keeps the C library from holding on to memory while weights are laid out. Without glibc it does nothing."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_TRIM_THRESHOLD: Final = -1
_LEAN_BYTES: Final = 256 << 10
_USUAL_BYTES: Final = 32 << 20
"""Where glibc's own adjustment ends up, and what steps want: their buffers are kept for the next one."""


@contextmanager
def lean_heap() -> Iterator[None]:
    """Give every freed tensor back to the system at once, inside.

    A layer's plain weight is freed when its packed form is there; kept by the heap, and cut to pieces there, such
    weights would add up to a good part of the model.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LEAN_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _LEAN_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_BYTES)
        libc.malloc_trim(0)
