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
        keys: a few windows of all, chosen by content and namespace.
    """

    tokens: int
    starts: Int64Array
    sums: UInt64Array
    keys: tuple[int, ...]


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
    keys = marks[marks % np.uint64(KEYS_APART) == 0][:_MOST_KEYS]
    return Glance(int(tokens.shape[0]), starts, sums[starts], tuple(keys.tolist()))


def cached_tokens(
    index: RunIndex, seen: Glance, namespaces: tuple[bytes, ...], after: int, max_depth: int
) -> int:
    """About how many tokens from position ``after`` on are in the index. Changes nothing.

    Args:
        namespaces: any of them serves; a token that two hold counts once.
        max_depth: tokens of a larger depth do not serve.
    """
    looked = seen.starts >= after
    if not looked.any():
        return 0
    sums = seen.sums[looked]
    held = np.zeros(sums.shape[0], dtype=np.bool_)
    for namespace in namespaces:
        held |= index.holds_windows(sums, namespace, max_depth)
    share = min(1.0, float(held.mean()) * index.window)
    return round(share * (seen.tokens - after))
