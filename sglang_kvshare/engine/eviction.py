"""Eviction that knows which nodes others lean on.

Seam: ``RadixCache.eviction_strategy`` with ``EvictionStrategy.get_priority``; whatever
``--radix-eviction-policy`` names decides among nodes of one level.

    evicted first  |-- level 0: no donors --|-- level 1 --|-- level 2 ...   evicted last
                     each in the policy's order

A node that has served as a donor ``u`` times is at level ``floor(weight * log2(1 + u))``. Uses
count for half after the pool's worth of tokens was evicted, so that a donor nobody asks for any
more sinks; that clock is the same on every rank.
"""

from __future__ import annotations

import math
from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

_ATTRIBUTE = "_kvshare_uses"


class DonorsLast(EvictionStrategy):
    """``policy``, with donors behind what serves nobody else.

    Args:
        policy: the order of nodes of one level.
        weight: 0 leaves the order to ``policy`` alone.
        pool_tokens: KV slots.
    """

    def __init__(self, policy: EvictionStrategy, weight: float, pool_tokens: int) -> None:
        self._policy = policy
        self._weight = weight
        self._pool_tokens = pool_tokens
        self._evicted_tokens = 0

    def get_priority(self, node: TreeNode) -> tuple[int, Any]:
        return self._level(node), self._policy.get_priority(node)

    def __getattr__(self, name: str) -> Any:
        # SGLang asks some policies for more than a priority.
        return getattr(self._policy, name)

    def used(self, node: TreeNode) -> None:
        """``node`` serves as a donor."""
        setattr(node, _ATTRIBUTE, (self.uses(node) + 1, self._turnovers))

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` took over the first part of ``lower``."""
        if (uses := getattr(lower, _ATTRIBUTE, None)) is not None:
            setattr(upper, _ATTRIBUTE, uses)

    def evicted(self, tokens: int) -> None:
        self._evicted_tokens += tokens

    def uses(self, node: TreeNode) -> float:
        """How often ``node`` served, older times for less."""
        count, then = getattr(node, _ATTRIBUTE, (0.0, 0.0))
        return float(count * 0.5 ** (self._turnovers - then))

    @property
    def _turnovers(self) -> float:
        return self._evicted_tokens / self._pool_tokens

    def _level(self, node: TreeNode) -> int:
        return int(self._weight * math.log2(1 + self.uses(node)))
