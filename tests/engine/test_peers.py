"""How ranks open their memory to each other, without a GPU: who learns what, and that they fail together."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

from services.scheduler.engine.kernels.all_reduce import PeerPlaces
from services.scheduler.engine.parallel import device_comm, peers
from services.scheduler.engine.parallel.comm import join_store, open_store
from services.scheduler.engine.parallel.device_comm import DeviceComm
from services.scheduler.engine.parallel.state import Ranks

NUM_BYTES = 4096


class Runtime:
    """The calls of a CUDA runtime; the memory of a rank lies at an address that tells how it was reserved."""

    broken = ""
    count = 0
    calls: ClassVar[list[tuple[str, int]]] = []

    def reserve(self, num_bytes: int) -> int:
        Runtime.count += 1
        if self.broken == "reserve" and Runtime.count == 2:
            raise RuntimeError("cudaMalloc: out of memory")
        self.calls.append(("reserve", num_bytes * Runtime.count))
        return num_bytes * Runtime.count

    def handle_of(self, address: int) -> bytes:
        if self.broken == "name" and address == 2 * NUM_BYTES:
            raise RuntimeError("cudaIpcGetMemHandle: not supported")
        return address.to_bytes(64, "big")

    def open(self, name: bytes) -> int:
        if self.broken == "open" and int.from_bytes(name, "big") == NUM_BYTES:
            raise RuntimeError("cudaIpcOpenMemHandle: invalid argument")
        self.calls.append(("open", int.from_bytes(name, "big") + 1))
        return int.from_bytes(name, "big") + 1

    def close(self, address: int) -> None:
        self.calls.append(("close", address))

    def free(self, address: int) -> None:
        self.calls.append(("free", address))


Found = peers.PeerMemory | peers.PeersUnreachable


def open_all(monkeypatch: pytest.MonkeyPatch, broken: str) -> list[Found]:
    monkeypatch.setattr(peers, "_Runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Runtime, "broken", broken)
    monkeypatch.setattr(Runtime, "count", 0)
    monkeypatch.setattr(Runtime, "calls", [])
    store = open_store(2)

    def of(rank: int) -> Found:
        own = store if rank == 0 else join_store(store.port, 2)
        try:
            return peers.open_peers(NUM_BYTES, Ranks(rank, 2), own, torch.device("cpu"))
        except peers.PeersUnreachable as e:
            return e

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def assert_all_is_given_back() -> None:
    """Each rank's piece is freed once, and not before whoever opened it has closed it."""
    calls = Runtime.calls
    for what, back in (("reserve", "free"), ("open", "close")):
        taken = sorted(address for name, address in calls if name == what)
        assert taken == sorted(address for name, address in calls if name == back)
    for name, address in calls:
        if name == "close":
            assert calls.index((name, address)) < calls.index(("free", address - 1))


def test_each_rank_learns_the_addresses_of_all_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_all(monkeypatch, "")
    assert isinstance(first, peers.PeerMemory) and isinstance(second, peers.PeerMemory)
    own, other = first.addresses[0], second.addresses[1]
    assert {own, other} == {NUM_BYTES, 2 * NUM_BYTES}
    assert (first.addresses, second.addresses) == ([own, other + 1], [own + 1, other])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(peers.PeerMemory.give_back, (first, second)))
    assert_all_is_given_back()


@pytest.mark.parametrize(
    ("broken", "words", "reserved"),
    [("reserve", "out of memory", 1), ("name", "not supported", 2), ("open", "invalid argument", 2)],
)
def test_all_ranks_fail_when_one_does(monkeypatch: pytest.MonkeyPatch, broken: str, words: str, reserved: int) -> None:
    found = open_all(monkeypatch, broken)
    assert all(isinstance(each, peers.PeersUnreachable) for each in found)
    assert words in str(found[0]) + str(found[1])
    assert "another rank failed" in str(found[0]) + str(found[1])
    assert [name for name, _ in Runtime.calls].count("reserve") == reserved
    assert_all_is_given_back()


@pytest.mark.parametrize("failing", ["", "cudaMemset"])
def test_memory_that_cannot_be_cleared_is_freed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def call(name: str, *args: Any) -> None:
        calls.append(name)
        if name == "cudaMalloc":
            args[0]._obj.value = NUM_BYTES
        if name == failing:
            raise RuntimeError(name)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runtime = peers._Runtime.__new__(peers._Runtime)
    runtime._call = call  # type: ignore[method-assign]
    with nullcontext() if not failing else pytest.raises(RuntimeError, match=failing):
        assert runtime.reserve(8) == NUM_BYTES
    assert calls == ["cudaMalloc", "cudaMemset", *(["cudaFree"] if failing else [])]


class Alone(DeviceComm):
    """Of two ranks, without the other; keeps the order of its calls."""

    def __init__(self, answers: list[int]) -> None:
        self.ranks, self._device, self._store, self._places = Ranks(0, 2), torch.device("cpu"), None, None
        self.calls: list[str] = []
        self.answers = answers

    def least(self, value: int) -> int:
        self.calls.append(f"least {value}")
        return self.answers.pop(0)


@pytest.mark.parametrize("is_right", [True, False])
def test_sums_are_tried_out_when_all_ranks_have_compiled_them(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = peers.PeerMemory(Ranks(0, 2), None, torch.device("cpu"))
    memory.addresses = [1000, 2000]
    comm = Alone([0, int(is_right)])

    def all_reduce(x: torch.Tensor, places: PeerPlaces) -> torch.Tensor:
        alone = places.addresses[0] == places.addresses[1]
        assert places.addresses.tolist() == memory.addresses or (alone and not places.calls.any())
        places.calls.add_(1)
        comm.calls.append("rehearsed" if alone else "tried")
        return 2 * x + is_right

    monkeypatch.setattr(device_comm, "open_peers", lambda *_: memory)
    monkeypatch.setattr(device_comm.quick, "all_reduce", all_reduce)
    monkeypatch.setattr(memory, "give_back", lambda: comm.calls.append("given back"))
    comm._open_places()
    assert comm.is_direct is is_right
    wanted = ["rehearsed"] * 4 + ["least 0"] + ["tried"] * 12 + [f"least {int(is_right)}"]
    assert comm.calls == wanted + ["given back"] * (not is_right)
