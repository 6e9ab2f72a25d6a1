"""About how much of a prompt is cached, at a glance: what the order of waiting requests rests on.

    windows of the prompt   |--------|--------|--------|--------|--------|--------|-- ...
    looked up                ^^^^^^^^                            ^^^^^^^^

``w`` windows begin in each stretch of ``w`` tokens, and the run index holds one of them where the
stretch is cached (see :mod:`~sglang_kvshare.matching.run_index`). So the share of the looked-up
windows that it holds, times ``w``, estimates the share of the prompt that is cached. Nothing is
verified or extended: a plan costs more than ten times as much, and is made when a request is
admitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_kvshare.matching.window_hash import UInt64Array, mixed, seed_of, window_sums
from sglang_kvshare.plan import Int64Array

if TYPE_CHECKING:
    from sglang_kvshare.matching.run_index import RunIndex

#: Stretches of a prompt that are looked at, at least; of long ones one in ``_MOST_APART``.
_STRETCHES, _MOST_APART = 32, 8
#: One window in so many is a key, by its content alone: equal passages have equal keys.
KEYS_APART = 64
#: Of a very long prompt the first keys stand for all.
_MOST_KEYS = 256


@dataclass(frozen=True)
class Glance:
    """Some windows of a prompt.

    Attributes:
        tokens: length of the prompt.
        starts: int64 ``[k]``, ascending: where they begin.
        sums: uint64 ``[k]``: their content, as ``window_sums`` says it.
        block_tokens: one stretch of windows in so many tokens is looked at.
        keys: a few windows of all, chosen by content and namespace, in their order.
        key_starts: int64 ``[len(keys)]``: where these begin.
    """

    tokens: int
    starts: Int64Array
    sums: UInt64Array
    block_tokens: int
    keys: tuple[int, ...]
    key_starts: Int64Array


@dataclass(frozen=True)
class Cached:
    """What of a prompt seems to be cached.

    Attributes:
        tokens: about so many.
        new_keys: keys of what is not, in their order.
    """

    tokens: int
    new_keys: tuple[int, ...]


def glance(tokens: Int64Array, window: int, namespace: bytes) -> Glance:
    """
    Args:
        tokens: int ``[n]``.
        window: ``w`` of the run index.
        namespace: keys of others are other ones.
    """
    sums = window_sums(tokens, window)
    apart = min(_MOST_APART, max(1, tokens.shape[0] // (window * _STRETCHES)))
    starts = np.arange(sums.shape[0], dtype=np.int64)
    starts = starts[starts // window % apart == 0]
    marks = mixed(sums + np.uint64(seed_of(namespace, 0)))
    at = np.flatnonzero(marks % np.uint64(KEYS_APART) == 0)[:_MOST_KEYS]
    keys = tuple(marks[at].tolist())
    return Glance(int(tokens.shape[0]), starts, sums[starts], window * apart, keys, at)


def cached_of(
    index: RunIndex, seen: Glance, namespaces: tuple[bytes, ...], after: int, max_depth: int
) -> Cached:
    """What of the prompt from position ``after`` on is in the index. Changes nothing.

    Args:
        namespaces: any of them serves, a token that two hold counts once; none: nothing is cached.
        max_depth: tokens of a larger depth do not serve.
    """
    looked = seen.starts >= after
    starts, sums = seen.starts[looked], seen.sums[looked]
    held = np.zeros(sums.shape[0], dtype=np.bool_)
    for namespace in namespaces:
        held |= index.holds_windows(sums, namespace, max_depth)
    behind = seen.key_starts >= after
    covered = np.isin(seen.key_starts // seen.block_tokens, starts[held] // seen.block_tokens)
    new_keys = tuple(seen.keys[i] for i in np.flatnonzero(behind & ~covered).tolist())
    share = min(1.0, float(held.mean()) * index.window) if held.shape[0] else 0.0
    return Cached(round(share * max(0, seen.tokens - after)), new_keys)
