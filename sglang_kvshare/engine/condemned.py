"""Parts of the radix tree that must serve nobody any more, and leave as soon as nobody needs them.

    root -- [system] -- [alice's text] -- [alice's next turn]      alice is forgotten
                  \\
                   ~~ [alice's text] -- [alice's next turn]        until a running request lets go

A condemned part keeps its place below its parent, with its locks and its slots, under a key that no
request can ask for: exact matching and branches pass it by, and every count of SGLang's stays true.
Whoever runs on it must not publish: its row names slots that the tree owns in a place where an
insertion would not find them.

Seams: ``RadixCache`` (``_delete_leaf``, ``dec_lock_ref``), ``TreeNode.lock_ref``, ``RadixKey``,
``KVCacheEventRecorder.record_remove``, ``free_segment`` of the allocators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_kvshare.engine import branches

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_kvshare_condemned"


def is_condemned(node: TreeNode | None) -> bool:
    return getattr(node, _ATTRIBUTE, False)


class Condemned:
    """Takes nodes out of use, and out of the tree when their last lock is gone.

    Args:
        cache: the tree.
        overwrite: called with the slots (int64, on the pool's device) that are about to be free.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.overwrite: Callable[[torch.Tensor], None] | None = None
        #: What left since the last question was overwritten, if anything is.
        self.overwrites = True
        self._count = 0
        self._left = 0

    @property
    def nodes(self) -> int:
        """Condemned nodes that are still in the tree."""
        return self._left

    def clear(self) -> None:
        self._left = 0

    def take(self, tops: Iterable[TreeNode]) -> list[TreeNode]:
        """Condemn ``tops`` and what hangs below them; what is not locked leaves at once.

        Returns:
            the nodes that are condemned now and were not before.
        """
        parts = [part for top in tops if (part := self._condemn(top))]
        nodes = [node for part in parts for node in part]
        if not nodes:
            return []
        self._left += len(nodes)
        self._cache.mirror.retire(nodes)
        # A part that hangs below another one was taken before it.
        children_first = (node for part in parts for node in reversed(part))
        self._delete([node for node in children_first if not node.lock_ref])
        # What donors' locks still hold leaves with these.
        self._cache.donors.release_where(is_condemned)
        return nodes

    def _condemn(self, top: TreeNode) -> list[TreeNode]:
        """Parents before their children."""
        if is_condemned(top):
            return []
        nodes = list(_not_yet_condemned(top))
        for node in nodes:
            # By its own key; a branch was never told of.
            self._cache.kv_events.record_remove(node)
        self._hide(top)
        for node in nodes:
            setattr(node, _ATTRIBUTE, True)
        return nodes

    def unlocked(self, node: TreeNode) -> None:
        """A lock on ``node``, and so on all above it, has been given back."""
        free = []
        while is_condemned(node) and not node.lock_ref:
            # Locks below would be locks here: what is below has left already.
            free.append(node)
            node = node.parent
        self._delete(free)

    def _hide(self, top: TreeNode) -> None:
        cache, key = self._cache, top.key
        self._count += 1
        hidden = RadixKey(
            key.token_ids,
            branches.tagged(
                branches.untagged(key.extra_key), f"condemned {self._count}", cache.generation
            ),
            is_bigram=key.is_bigram,
            limit=key.limit,
            cache_salt=key.cache_salt,
        )
        siblings = top.parent.children
        del siblings[key.child_key(cache.page_size)]
        top.key = hidden
        siblings[hidden.child_key(cache.page_size)] = top

    def _delete(self, nodes: list[TreeNode]) -> None:
        """Children first."""
        if not nodes:
            return
        slots = torch.cat([node.value for node in nodes])
        if self.overwrite is not None:
            try:
                self.overwrite(slots)
            except Exception:
                logger.exception("KVShare could not overwrite %d slots with zeros", len(slots))
                self.overwrites = False
                self._cache.fault("retention")
        # As eviction does: what the tree holds are copies of whole pages of a row.
        self._cache.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        for node in nodes:
            self._cache._delete_leaf(node)
        self._left -= len(nodes)


def _not_yet_condemned(top: TreeNode) -> Iterator[TreeNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in node.children.values() if not is_condemned(child)]
