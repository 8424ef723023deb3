"""Memory of each GPU of a host that the processes of the other GPUs can write to.

Owns its reservation and the exchange of names; who writes what there is the kernels' business. It goes through the
CUDA runtime that torch has loaded, as torch has no call for it. No multicast is used.
"""

import ctypes
import logging
from collections.abc import Callable
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


class PeerMemory:
    """A piece of memory on each GPU that all ranks reach; it is kept until it is given back, or the process ends.

    Attributes:
        addresses: of each rank's piece, as this rank's GPU reaches it.
    """

    def __init__(self, ranks: Ranks, store: Any, device: torch.device) -> None:
        """Nothing is reserved yet; see `open_peers`."""
        self.addresses: list[int] = []
        self._ranks = ranks
        self._store = store
        self._device = device
        self._runtime: _Runtime | None = None
        self._own = 0
        self._opened: list[int] = []

    def reserve(self, num_bytes: int) -> bytes:
        """Reserve this rank's piece; returns its name for the others.

        Raises:
            RuntimeError: it is not to be had, or cannot be named.
        """
        with torch.cuda.device(self._device):
            self._runtime = _Runtime()
            self._own = self._runtime.reserve(num_bytes)
            return self._runtime.handle_of(self._own)

    def open(self, names: list[bytes]) -> None:
        """Open the pieces of all ranks, by their names.

        Raises:
            RuntimeError: one cannot be reached.
        """
        assert self._runtime is not None
        with torch.cuda.device(self._device):
            for rank, name in enumerate(names):
                if rank != self._ranks.rank:
                    self._opened.append(self._runtime.open(name))
        others = iter(self._opened)
        self.addresses = [self._own if rank == self._ranks.rank else next(others) for rank in range(len(names))]

    def give_back(self) -> None:
        """Close the others' pieces and, when none of them has it open any more, free one's own; all ranks call this.

        Nothing on any GPU may use them any more.
        """
        runtime, opened, own = self._runtime, self._opened, [self._own] if self._own else []
        self.addresses, self._opened, self._own = [], [], 0
        if runtime is not None:
            self._each(opened, runtime.close)
        _tell_all(self._store, "peer-closed", self._ranks, b"yes")
        if runtime is not None:
            self._each(own, runtime.free)

    def _each(self, addresses: list[int], act: Callable[[int], None]) -> None:
        with torch.cuda.device(self._device):
            for address in addresses:
                try:
                    act(address)
                except RuntimeError as e:  # the others wait for this rank all the same
                    log.warning("memory that GPUs reach of each other is not given back: %s", e)


def open_peers(num_bytes: int, ranks: Ranks, store: Any, device: torch.device) -> PeerMemory:
    """Reserve memory, zeroed, and open that of the other ranks.

    Args:
        num_bytes: what each rank reserves.
        ranks: who this is; all of them make this call.
        store: where they find each other.
        device: of this rank.

    Raises:
        PeersUnreachable: some rank failed; then every rank raises it, and nothing stays reserved.
    """
    memory = PeerMemory(ranks, store, device)
    error: RuntimeError | None = None
    name = _FAILED
    try:
        name = memory.reserve(num_bytes)
    except RuntimeError as e:
        error = e
    names = _tell_all(store, "peer-memory", ranks, name)
    if _FAILED not in names:
        try:
            memory.open(names)
        except RuntimeError as e:
            error = e
    if _FAILED in _tell_all(store, "peer-opened", ranks, b"yes" if memory.addresses else _FAILED):
        memory.give_back()
        raise PeersUnreachable(str(error or "another rank failed"))
    return memory


def _tell_all(store: Any, what: str, ranks: Ranks, word: bytes) -> list[bytes]:
    """Tell every rank a word, and wait for theirs."""
    store.set(f"{what}/{ranks.rank}", word.hex())
    words = [store.get(f"{what}/{rank}") for rank in range(ranks.size)]
    return [bytes.fromhex(text.decode()) for text in words]


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
        assert address.value is not None
        try:
            self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
            torch.cuda.synchronize()
        except RuntimeError:
            self.free(address.value)
            raise
        return address.value

    def free(self, address: int) -> None:
        """Give reserved memory back."""
        self._call("cudaFree", ctypes.c_void_p(address))

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

    def close(self, address: int) -> None:
        """Close what was opened."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            self._library.cudaGetLastError()  # or torch finds it at its next call
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(status).decode()}")
