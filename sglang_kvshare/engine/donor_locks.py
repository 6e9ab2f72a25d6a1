"""Locks that keep donors in the tree from planning until their values are copied.

Seams: ``BasePrefixCache.lock``, ``BasePrefixCache.unlock``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_kvshare.engine.state import RequestState
from sglang_kvshare.plan import Placement


class DonorLocks:
    """Owner of all donor locks; each is released exactly once.

    Locks are soft: they keep donors in the tree while anything else can be evicted, and give way
    before an allocation would fail. A donor that is gone costs its tokens, not a request.
    """

    def __init__(self, lock: Callable[[TreeNode], Any], unlock: Callable[[Any], None]) -> None:
        self._lock = lock
        self._unlock = unlock
        #: In the order of their coming: on every rank slots are given back in the same one.
        self._holders: dict[RequestState, None] = {}

    def __len__(self) -> int:
        return sum(len(state.donor_locks) for state in self._holders)

    @property
    def holders(self) -> int:
        """Requests that hold donors."""
        return len(self._holders)

    def hold(self, state: RequestState, placement: Placement, owners: dict[int, TreeNode]) -> int:
        """Keep ``owners``, the nodes that own the slots of ``placement``, until released.

        Returns:
            the number of donors: cached sequences that serve.
        """
        self.release(state)
        # A node above another one belongs to the same sequence, and a lock below covers it.
        parents = {parent.id: parent for node in owners.values() for parent in _above(node)}
        # A donor that serves is in use, for eviction as well. Each gets a time of its own: equal
        # times would leave the order of eviction to memory addresses, which differ between ranks.
        for node in (*owners.values(), *parents.values()):
            node.last_access_time = time.monotonic()
        donors = [node for number, node in owners.items() if number not in parents]
        self._holders[state] = None
        for node in donors:
            state.donor_locks.append(self._lock(node))
        state.placement = placement
        return len(donors)

    def release(self, state: RequestState) -> None:
        """Let go of a request's donors; what was not placed yet is computed. Idempotent."""
        locks, state.donor_locks, state.placement = state.donor_locks, [], None
        self._holders.pop(state, None)
        for lock in locks:
            self._unlock(lock)

    def release_all(self) -> None:
        for state in list(self._holders):
            self.release(state)

    def release_where(self, lost: Callable[[TreeNode], bool]) -> None:
        """Let go for the requests that hold a donor which is ``lost``."""
        for state in list(self._holders):
            if any(lost(held.node) for held in state.donor_locks):
                self.release(state)

    def drop(self) -> None:
        """The locked nodes are gone with their tree; there is nothing to unlock."""
        for state in self._holders:
            state.placement, state.donor_locks = None, []
        self._holders.clear()


def _above(node: TreeNode) -> Iterator[TreeNode]:
    """The nodes between the root and ``node``, both left out."""
    while (node := node.parent).parent is not None:
        yield node
