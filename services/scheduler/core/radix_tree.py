"""The radix tree: a prefix cache that shares every common run of full pages.

Each node holds a run of tokens and the pages that hold their KV; the path from a root spells a prefix. There is
one root per namespace. Siblings differ within their first page, so a child is found by the bytes of that page:

    root -- [sys sys sys sys] --+-- [hi there ....]        2 + 2 pages (page = 2 tokens)
                                +-- [bye ....]             2 + 1

A lock counts on every node from the handle's to the root, so a parent is locked at least as often as any child,
and what nobody locked can be given up from the leaves inwards. The least recently matched leaf goes first, from its
end. The leaves that may go lie in a heap; entries that became wrong are dropped when they come up.
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from services.scheduler.core.batch import IntArray
from services.scheduler.core.prefix_cache import NO_PAGES, Insertion, PrefixHandle


class _Node:
    """One run of tokens. As a handle it stands for the prefix that ends with it."""

    __slots__ = ("children", "locks", "namespace", "pages", "parent", "token_ids", "used")

    def __init__(self, namespace: str, token_ids: IntArray, pages: IntArray, parent: "_Node | None") -> None:
        self.namespace = namespace
        self.token_ids = token_ids
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.locks = 0
        self.used = 0

    @property
    def num_pages(self) -> int:
        return sum(len(node.pages) for node in self.path())

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> Iterator["_Node"]:
        """From here to below the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """See the module. Implements PrefixCache."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0
        self._roots: dict[str, _Node] = {}
        self._ticks = itertools.count(1)
        self._now = 0
        self._leaves: list[tuple[int, int, _Node]] = []
        self._num_nodes = 0

    def match(self, namespace: str, token_ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        """See PrefixCache."""
        node = self._walk(namespace, token_ids)
        return node, self._pages(node)

    def insert(self, namespace: str, token_ids: IntArray, pages: IntArray) -> Insertion:
        """See PrefixCache."""
        size = self.page_size
        num_pages = len(token_ids) // size
        node = self._walk(namespace, token_ids[: num_pages * size])
        known = self._pages(node)
        if len(known) == num_pages:
            return Insertion(node, known, NO_PAGES)
        tail = token_ids[len(known) * size : num_pages * size].copy()
        leaf = _Node(namespace, tail, pages[len(known) : num_pages].copy(), node)
        node.children[self._key(tail)] = leaf
        if node.is_root:
            self._roots[namespace] = node
        leaf.used = self._now
        self._num_nodes += 1
        self.num_pages += len(leaf.pages)
        self.num_evictable += len(leaf.pages)
        self._offer(leaf)
        return Insertion(leaf, known, leaf.pages.copy())

    def lock(self, handle: PrefixHandle) -> None:
        """See PrefixCache."""
        for node in _own(handle).path():
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """See PrefixCache."""
        for node in _own(handle).path():
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._offer(node)

    def evict(self, num: int) -> IntArray:
        """See PrefixCache."""
        evicted: list[IntArray] = []
        while num > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if not self._may_go(node):
                continue
            if used != node.used:
                self._offer(node)
                continue
            evicted.append(self._cut(node, min(num, len(node.pages))))
            num -= len(evicted[-1])
        return np.concatenate(evicted) if evicted else NO_PAGES

    def check(self) -> None:
        """See PrefixCache."""
        nodes = [node for root in self._roots.values() for node in _below(root)]
        pages = np.concatenate([node.pages for node in nodes]) if nodes else NO_PAGES
        assert len(np.unique(pages)) == len(pages) == self.num_pages, "a page is in the tree twice, or miscounted"
        assert self.num_evictable == sum(len(n.pages) for n in nodes if n.locks == 0), "evictable pages miscounted"
        assert len(nodes) == self._num_nodes, "nodes miscounted"
        for node in nodes:
            assert node.parent is not None and len(node.pages) > 0
            assert len(node.token_ids) == len(node.pages) * self.page_size
            assert node.parent.children[self._key(node.token_ids)] is node
            assert node.parent.is_root or node.parent.locks >= node.locks, "a child is locked more often"
            assert node.parent.is_root or node.parent.used >= node.used, "a child is younger than its parent"
        offered = {id(node) for _, _, node in self._leaves}
        assert all(id(node) in offered for node in nodes if self._may_go(node)), "a leaf cannot be evicted"

    def _walk(self, namespace: str, token_ids: IntArray) -> _Node:
        """Follow a prefix as far as it is cached; a node that it leaves half way is split there."""
        node = self._roots.get(namespace) or _Node(namespace, NO_PAGES, NO_PAGES, None)
        self._now = next(self._ticks)
        size, at = self.page_size, 0
        while len(token_ids) - at >= size:
            child = node.children.get(self._key(token_ids[at : at + size]))
            if child is None:
                break
            num = self._common(child.token_ids, token_ids[at:])
            node = child if num == len(child.token_ids) else self._split(child, num // size)
            node.used = self._now
            at += num
            if node is not child:
                break
        return node

    def _common(self, a: IntArray, b: IntArray) -> int:
        """Tokens in full pages that two runs have in common."""
        num = min(len(a), len(b))
        differs = a[:num] != b[:num]
        first = int(differs.argmax())
        if differs[first]:
            num = first
        return num - num % self.page_size

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Put the first pages of a node into a new one above it, which is returned. Handles to the node stay good."""
        parent, at = node.parent, num_pages * self.page_size
        assert parent is not None
        upper = _Node(node.namespace, node.token_ids[:at], node.pages[:num_pages], parent)
        upper.locks = node.locks
        upper.used = node.used
        parent.children[self._key(upper.token_ids)] = upper
        node.token_ids, node.pages, node.parent = node.token_ids[at:], node.pages[num_pages:], upper
        upper.children[self._key(node.token_ids)] = node
        self._num_nodes += 1
        return upper

    def _cut(self, node: _Node, num_pages: int) -> IntArray:
        """Take pages off the end of a leaf; the leaf goes when it is empty, and its parent may be a leaf then."""
        keep = len(node.pages) - num_pages
        pages = node.pages[keep:]
        self.num_pages -= num_pages
        self.num_evictable -= num_pages
        if keep:
            node.token_ids, node.pages = node.token_ids[: keep * self.page_size].copy(), node.pages[:keep].copy()
            self._offer(node)
            return pages
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.token_ids)]
        node.parent = None
        self._num_nodes -= 1
        if not parent.is_root:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.namespace]
        return pages

    def _offer(self, node: _Node) -> None:
        """Put a node into the heap of leaves if it may go."""
        if not self._may_go(node):
            return
        heapq.heappush(self._leaves, (node.used, next(self._ticks), node))
        if len(self._leaves) > 4 * self._num_nodes + 64:
            leaves = {id(n): n for _, _, n in self._leaves if self._may_go(n)}
            self._leaves = [(n.used, next(self._ticks), n) for n in leaves.values()]
            heapq.heapify(self._leaves)

    def _key(self, token_ids: IntArray) -> bytes:
        return token_ids[: self.page_size].tobytes()

    @staticmethod
    def _may_go(node: _Node) -> bool:
        return node.locks == 0 and not node.children and not node.is_root

    @staticmethod
    def _pages(node: _Node) -> IntArray:
        runs = [n.pages for n in node.path()]
        return np.concatenate(runs[::-1]) if runs else NO_PAGES


def _own(handle: PrefixHandle) -> _Node:
    assert isinstance(handle, _Node), "a handle of another cache"
    return handle


def _below(root: _Node) -> Iterator[_Node]:
    """Every node under a root."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
