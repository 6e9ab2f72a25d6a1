"""SGLang's radix cache with the seams that swapping needs; it decides nothing itself.

Seams: ``BasePrefixCache`` (``claim_kv_row`` and ``session_records``, by which a streaming session
keeps a row and has it accounted for; ``init_load_back``, ``load_back_is_cache_owned`` and
``prefix_device_indices``, by which host tiers give a request slots of its own;
``release_aborted_request``).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_kvshare.engine.swapping import Swapping


class SwappableRadixCache(RadixCache):
    """``swapping`` must be set before ``__init__`` runs, which resets the tree."""

    swapping: Swapping

    def reset(self) -> None:
        super().reset()
        self.swapping.clear()

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        return self.swapping.load(params.req, params.host_hit_length), params.req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """The slots are the request's own, as what it computes is."""
        return False

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        path = self.swapping.restored(req, self.path_device_indices(req.last_node))
        assert len(path) >= req.prefix_len, (req.rid, len(path), req.prefix_len)
        return path[: req.prefix_len]

    def backup_on_retract(self, req: Any) -> bool:
        """Called by an SGLang with the patch of that name; otherwise a hook does the same."""
        self.swapping.swap_out(req)
        return self.swapping.keeps(req)

    def claim_kv_row(self, req: Any) -> bool:
        return self.swapping.claim(req)

    def session_records(self) -> dict[str, Any]:
        return {**super().session_records(), **self.swapping.left_rows()}

    def release_aborted_request(self, handle: Any) -> None:
        super().release_aborted_request(handle)
        self.swapping.ended(handle)
