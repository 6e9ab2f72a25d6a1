"""Donors do not outlive the weights that computed them.

Seams: the methods of ``SchedulerWeightUpdaterManager`` that change weights. SGLang flushes its
cache after most of them; with ``flush_cache: false``, while requests run, or when an update fails
half way, it does not. Its exact prefixes stay as it decides; donors and branches go every time.
"""

from __future__ import annotations

from typing import Any

from sglang_kvshare.engine.tree_cache import KVShareRadixCache


def changed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of each of :data:`~sglang_kvshare.engine.seams.WEIGHT_UPDATES`."""
    try:
        return original(self, *args, **kwargs)
    finally:
        cache = getattr(self.scheduler, "tree_cache", None)
        if isinstance(cache, KVShareRadixCache):
            cache.forget_donors()
