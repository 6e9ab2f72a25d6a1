"""Approximate branches of the radix tree: where they hang, and what they serve.

    root -- [exact a b c d] -- [exact e f g]
                     \\
                      == [approximate e f g h] == [approximate i j]
            tag on every key of the branch

KV that rests on placed values hangs below the last exact node of its sequence. The keys of its
nodes carry a tagged ``extra_key``, which is part of every child key in SGLang's tree: exact
matching never enters a branch, and each slot keeps one owner, one lock and one place in the
eviction order, as any other.

Seams: ``RadixKey`` (``extra_key`` is part of ``child_key_at``), ``TreeNode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

#: First character of a tagged key. A key of a namespace begins with a digit or with "-"
#: (`Namespace.tree_key`), so that no client can name a branch.
_MARK = "~"
_DEPTH = "_kvshare_depth"
#: Branches of one path that are measured, from the deepest up.
_MAX_BRANCHES = 8


@dataclass(frozen=True)
class Branch:
    """What an approximate branch serves of a key: ``[start, end)`` below ``node``."""

    node: TreeNode
    start: int
    end: int


def tagged(extra_key: str | None, quality: str, generation: int) -> str:
    """``extra_key`` of a branch.

    Args:
        extra_key: the namespace's own (the salt has a field of its own).
        quality: settings that the values were computed with; others get a branch of their own.
        generation: of the model's weights.
    """
    base = "" if extra_key is None else extra_key
    return f"{_MARK}{generation};{len(quality)}:{quality};{'-' if extra_key is None else '+'}{base}"


def is_approximate(node: TreeNode) -> bool:
    extra_key = node.key.extra_key
    return extra_key is not None and extra_key.startswith(_MARK)


def untagged(extra_key: str | None) -> str | None:
    """The namespace's own ``extra_key`` of a node's key, in a branch or not."""
    if extra_key is None or not extra_key.startswith(_MARK):
        return extra_key
    _, _, rest = extra_key.partition(";")
    length, _, rest = rest.partition(":")
    base = rest[int(length) + 1 :]
    return None if base.startswith("-") else base[1:]


def depth_of(node: TreeNode) -> int:
    """Approximations that rest on each other in a node's values; 0 for exact ones."""
    return getattr(node, _DEPTH, 0)


def set_depth(node: TreeNode, depth: int) -> None:
    setattr(node, _DEPTH, depth)


def exact_ancestor(node: TreeNode) -> tuple[TreeNode, int]:
    """The last exact node on the path to ``node``, and the approximate tokens below it."""
    tokens = 0
    while is_approximate(node):
        tokens += len(node.key)
        node = node.parent
    return node, tokens


def path_tokens(node: TreeNode) -> int:
    """Tokens from the root to the end of ``node``."""
    tokens = 0
    while node is not None:
        tokens += len(node.key)
        node = node.parent
    return tokens


def longest_branch(key: RadixKey, exact_node: TreeNode, exact_end: int, page_size: int) -> Any:
    """The approximate branch that serves most of ``key``; changes nothing.

    Args:
        key: the whole prompt with the branch's tag, in whole pages.
        exact_node, exact_end: where exact matching ended.

    Returns:
        a :class:`Branch` that ends beyond ``exact_end``, or ``None``.
    """
    best, found = None, 0
    node, start = exact_node, exact_end
    while node is not None and found < _MAX_BRANCHES:
        end = _reach(node, key, start, page_size)
        found += end > start
        if end > (exact_end if best is None else best.end):
            best = Branch(node, start, end)
        start -= len(node.key)
        node = node.parent
    return best


def _reach(node: TreeNode, key: RadixKey, position: int, page_size: int) -> int:
    """Position up to which nodes below ``node`` hold ``key``."""
    while position + page_size <= len(key):
        child = node.children.get(key.child_key_at(position, page_size))
        if child is None:
            break
        matched = child.key.match_at(key, position, page_size)
        position, node = position + matched, child
        if matched < len(child.key):
            break
    return position
