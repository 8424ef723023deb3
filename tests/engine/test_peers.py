"""How ranks open their memory to each other, without a GPU: who learns what, and that they fail together."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from services.scheduler.engine.parallel import peers
from services.scheduler.engine.parallel.comm import join_store, open_store
from services.scheduler.engine.parallel.state import Ranks

NUM_BYTES = 4096


class Runtime:
    """The calls of a CUDA runtime; the memory of a rank lies at an address that tells how it was reserved."""

    broken = ""
    count = 0

    def reserve(self, num_bytes: int) -> int:
        Runtime.count += 1
        if self.broken == "reserve" and Runtime.count == 2:
            raise RuntimeError("cudaMalloc: out of memory")
        return num_bytes * Runtime.count

    def handle_of(self, address: int) -> bytes:
        return address.to_bytes(64, "big")

    def open(self, name: bytes) -> int:
        if self.broken == "open" and int.from_bytes(name, "big") == NUM_BYTES:
            raise RuntimeError("cudaIpcOpenMemHandle: invalid argument")
        return int.from_bytes(name, "big") + 1


def open_all(monkeypatch: pytest.MonkeyPatch, broken: str) -> list[list[int] | peers.PeersUnreachable]:
    monkeypatch.setattr(peers, "_Runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Runtime, "broken", broken)
    monkeypatch.setattr(Runtime, "count", 0)
    store = open_store(2)

    def of(rank: int) -> list[int] | peers.PeersUnreachable:
        own = store if rank == 0 else join_store(store.port, 2)
        try:
            return peers.open_peers(NUM_BYTES, Ranks(rank, 2), own, torch.device("cpu"))
        except peers.PeersUnreachable as e:
            return e

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def test_each_rank_learns_the_addresses_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_all(monkeypatch, "")
    assert isinstance(first, list) and isinstance(second, list)
    own, other = first[0], second[1]
    assert {own, other} == {NUM_BYTES, 2 * NUM_BYTES}
    assert (first, second) == ([own, other + 1], [own + 1, other])


@pytest.mark.parametrize(("broken", "words"), [("reserve", "out of memory"), ("open", "invalid argument")])
def test_all_ranks_fail_when_one_does(monkeypatch: pytest.MonkeyPatch, broken: str, words: str) -> None:
    found = open_all(monkeypatch, broken)
    assert all(isinstance(each, peers.PeersUnreachable) for each in found)
    assert words in str(found[0]) + str(found[1])
    assert "another rank failed" in str(found[0]) + str(found[1])
