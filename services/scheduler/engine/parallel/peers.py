"""Memory of each GPU of a host that the processes of the other GPUs can write to.

Owns its reservation and the exchange of handles; who writes what there is the kernels' business. It goes through the
CUDA runtime that torch has loaded, as torch has no call for it. No multicast is used.
"""

import ctypes
import logging
from pathlib import Path
from typing import Any, Final

import torch

from services.scheduler.engine.parallel.state import Ranks

log = logging.getLogger(__name__)

_HANDLE_BYTES: Final = 64
_WITH_PEER_ACCESS: Final = 1
_FAILED: Final = b"no"


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_BYTES),)


class PeersUnreachable(RuntimeError):
    """A GPU cannot reach another one's memory."""


def open_peers(num_bytes: int, ranks: Ranks, store: Any, device: torch.device) -> list[int]:
    """Reserve memory, zeroed, and open that of the other ranks. It is kept until the process ends.

    Args:
        num_bytes: what each rank reserves.
        ranks: who this is; all of them make this call.
        store: where they find each other.
        device: of this rank.

    Returns:
        The address of each rank's piece, as this rank's GPU reaches it.

    Raises:
        PeersUnreachable: some rank failed; then every rank raises it.
    """
    addresses: list[int] = []
    error: RuntimeError | None = None
    handle = _FAILED
    runtime: _Runtime | None = None
    with torch.cuda.device(device):
        try:
            runtime = _Runtime()
            own = runtime.reserve(num_bytes)
            handle = runtime.handle_of(own)
        except RuntimeError as e:
            error = e
        store.set(f"peer-memory/{ranks.rank}", handle.hex())
        handles = [store.get(f"peer-memory/{rank}") for rank in range(ranks.size)]
        texts = [bytes.fromhex(text.decode()) for text in handles]
        if _FAILED not in texts and runtime is not None:
            try:
                addresses = [own if rank == ranks.rank else runtime.open(texts[rank]) for rank in range(ranks.size)]
            except RuntimeError as e:
                error = e
    store.set(f"peer-opened/{ranks.rank}", b"yes" if addresses else _FAILED)
    if any(store.get(f"peer-opened/{rank}") == _FAILED for rank in range(ranks.size)):
        raise PeersUnreachable(str(error or "another rank failed"))
    return addresses


class _Runtime:
    """The few calls of the CUDA runtime that it takes."""

    def __init__(self) -> None:
        """Find the library that torch has loaded.

        Raises:
            RuntimeError: there is none.
        """
        torch.cuda.synchronize()
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
        found = sorted({line.split()[-1] for line in lines if "libcudart" in line})
        if not found:
            raise RuntimeError("torch has loaded no libcudart")
        self._library = ctypes.CDLL(found[0])
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]

    def reserve(self, num_bytes: int) -> int:
        """Reserve zeroed memory on the current device; returns its address."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize()
        assert address.value is not None
        return address.value

    def handle_of(self, address: int) -> bytes:
        """Name memory for other processes."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(memoryview(handle).cast("B"))

    def open(self, name: bytes) -> int:
        """Open memory of another process, perhaps of another device, for the current device."""
        handle, address = _Handle.from_buffer_copy(name), ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, ctypes.c_uint(_WITH_PEER_ACCESS))
        assert address.value is not None
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            self._library.cudaGetLastError()  # or torch finds it at its next call
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(status).decode()}")
