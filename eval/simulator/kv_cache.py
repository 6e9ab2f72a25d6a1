"""The KV pool and the radix tree over it, with a block of tokens a node.

    capacity = free + tree (locked or evictable) + private (held by requests, not in the tree)

A node is a block behind its parent's blocks: exact matching walks from the root. What can be
evicted stands in the order in which it was last used, children before their parents, so that the
oldest is always a leaf. The same block at another place has another node; KVShare finds it by its
content, in the same namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Node:
    """A block in the tree.

    Attributes:
        key: parent and content; what the tree is asked by.
        tokens: slots that it holds.
        locks: requests that need it.
        exact: computed on exact context, so that it may be a donor.
    """

    __slots__ = ("content", "exact", "key", "locks", "number", "parent", "tokens")

    def __init__(
        self, number: int, parent: Node | None, content: int, tokens: int, exact: bool
    ) -> None:
        self.number = number
        self.parent = parent
        self.key = (KvCache.ROOT if parent is None else parent.number, content)
        self.content = content
        self.tokens = tokens
        self.locks = 0
        self.exact = exact


class KvCache:
    """Owner of all slots of a pool.

    Args:
        capacity_tokens: slots.
        donors: whether blocks are found by content as well.
    """

    ROOT = 0

    def __init__(self, capacity_tokens: int, *, donors: bool = False) -> None:
        self.capacity = capacity_tokens
        self.free = capacity_tokens
        self.evictable = 0
        self.locked = 0
        #: Held by requests and in no node.
        self.private = 0
        self.evicted_tokens = 0
        self._nodes: dict[tuple[int, int], Node] = {}
        self._idle: OrderedDict[int, Node] = OrderedDict()
        self._made = 0
        #: Counts blocks that became donors, or are none any more.
        self.donor_changes = 0
        self._donors: dict[int, dict[int, Node]] | None = {} if donors else None

    # --- asking --------------------------------------------------------------------------------

    def matched(self, contents: Sequence[int]) -> list[Node]:
        """Nodes of the longest prefix that is cached. Changes nothing."""
        nodes, parent, path = self._nodes, self.ROOT, []
        for content in contents:
            node = nodes.get((parent, content))
            if node is None:
                break
            path.append(node)
            parent = node.number
        return path

    def has_donor(self, content: int) -> bool:
        """Whether the block is cached anywhere, on exact context."""
        return self._donors is not None and content in self._donors

    def unchanged(self, last: Node | None, after: int | None, donor_changes: int) -> bool:
        """Whether a match still ends at ``last``, before the content ``after``."""
        if last is not None and self._nodes.get(last.key) is not last:
            return False
        if after is not None:
            parent = self.ROOT if last is None else last.number
            if (parent, after) in self._nodes:
                return False
        return donor_changes == self.donor_changes

    @property
    def available(self) -> int:
        return self.free + self.evictable

    def check(self) -> None:
        """
        Raises:
            AssertionError: slots were lost or counted twice.
        """
        idle = sum(node.tokens for node in self._idle.values())
        whole = sum(node.tokens for node in self._nodes.values())
        assert idle == self.evictable, (idle, self.evictable)
        assert whole == self.evictable + self.locked, (whole, self.evictable, self.locked)
        assert min(self.free, self.private, self.locked) >= 0
        assert self.free + whole + self.private == self.capacity

    # --- taking and giving ---------------------------------------------------------------------

    def touch(self, path: Sequence[Node]) -> None:
        """It was used just now."""
        idle = self._idle
        for node in reversed(path):
            if not node.locks:
                idle.move_to_end(node.number)

    def touch_donor(self, content: int) -> None:
        """A block was taken from wherever it stands: it, and what stands before it, was used."""
        assert self._donors is not None
        node: Node | None = next(reversed(self._donors[content].values()))
        path = []
        while node is not None:
            path.append(node)
            node = node.parent
        self.touch(path[::-1])

    def lock(self, path: Sequence[Node]) -> None:
        for node in path:
            if not node.locks:
                del self._idle[node.number]
                self.evictable -= node.tokens
                self.locked += node.tokens
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Those that nobody needs any more count as used just now."""
        for node in reversed(path):
            node.locks -= 1
            if not node.locks:
                self._idle[node.number] = node
                self.evictable += node.tokens
                self.locked -= node.tokens

    def take(self, tokens: int) -> None:
        """Slots for a request, evicting what was used longest ago.

        Raises:
            ValueError: there are not as many; nothing is taken.
        """
        self.evict(tokens - self.free)
        if self.free < tokens:
            raise ValueError(f"{tokens} slots asked, {self.free} are free")
        self.free -= tokens
        self.private += tokens

    def give(self, tokens: int) -> None:
        """Slots that a request held for itself."""
        self.private -= tokens
        self.free += tokens

    def evict(self, tokens: int) -> None:
        """At least so many, or all that can be."""
        while tokens > 0 and self._idle:
            _, node = self._idle.popitem(last=False)
            del self._nodes[node.key]
            self.evictable -= node.tokens
            self.free += node.tokens
            self.evicted_tokens += node.tokens
            tokens -= node.tokens
            self._forget_donor(node)

    def publish(
        self, path: list[Node], blocks: Sequence[tuple[int, int, bool]]
    ) -> tuple[list[Node], int]:
        """Put a request's own blocks behind its locked path; they are locked for it.

        Args:
            path: what it has in the tree already.
            blocks: content, tokens and exactness of each, in order; its private slots.

        Returns:
            The longer path, and the slots of blocks that somebody else had put there meanwhile,
            which were given back.
        """
        path = list(path)
        parent = path[-1] if path else None
        doubled = 0
        for content, tokens, exact in blocks:
            key = (self.ROOT if parent is None else parent.number, content)
            node = self._nodes.get(key)
            if node is None:
                self._made += 1
                node = Node(self._made, parent, content, tokens, exact)
                node.locks = 1
                self._nodes[key] = node
                self.private -= tokens
                self.locked += tokens
                if exact and self._donors is not None:
                    self.donor_changes += content not in self._donors
                    self._donors.setdefault(content, {})[node.number] = node
            else:
                self.lock((node,))
                self.give(tokens)
                doubled += tokens
            path.append(node)
            parent = node
        return path, doubled

    def leave(self, path: Sequence[Node], tokens: int, content: int) -> None:
        """A request has ended: its answer stays behind its path, to be evicted when it is old."""
        if tokens:
            longer, _ = self.publish(list(path), [(content, tokens, False)])
            self.unlock(longer)
        else:
            self.unlock(path)

    def flush(self) -> None:
        """Evict all that nobody needs."""
        self.evict(self.evictable)

    def _forget_donor(self, node: Node) -> None:
        if node.exact and self._donors is not None:
            del self._donors[node.content][node.number]
            if not self._donors[node.content]:
                del self._donors[node.content]
                self.donor_changes += 1
