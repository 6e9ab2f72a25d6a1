"""Donors do not outlive the weights that computed them.

Seams: the methods of ``SchedulerWeightUpdaterManager`` that change weights. SGLang flushes its
cache after most of them; with ``flush_cache: false``, while requests run, or when an update fails
half way, it does not. Its exact prefixes stay as it decides; donors and branches go every time.
"""

from __future__ import annotations

from typing import Any

from sglang_kvshare.engine.tree_cache import KVShareRadixCache

_OWNER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
TARGETS = tuple(
    _OWNER + name
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
)


def changed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of each of :data:`TARGETS`."""
    try:
        return original(self, *args, **kwargs)
    finally:
        cache = getattr(self.scheduler, "tree_cache", None)
        if isinstance(cache, KVShareRadixCache):
            cache.forget_donors()
