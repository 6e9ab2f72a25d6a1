"""Zeros over keys and values that must not stay in memory.

Seams: ``MHATokenToKVPool.get_key_buffer`` and ``get_value_buffer`` (``[slots, heads, dim]``),
``ModelRunner.forward_stream``.
"""

from __future__ import annotations

from typing import Any

import torch


class Overwriter:
    """Enqueues on the forward stream: behind every forward and copy that may still read the slots,
    and before the first that can have been given them again.

    Args:
        runner: whose pool it is.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, slots: torch.Tensor) -> None:
        """Zero all layers' rows of ``slots``, int64 ``[n]`` on the pool's device."""
        if slots.device.type == "cpu":
            self._zero(slots)
            return
        module = torch.get_device_module(slots.device)
        stream = self._runner.forward_stream
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            self._zero(slots)
        slots.record_stream(stream)

    def _zero(self, slots: torch.Tensor) -> None:
        pool = self._runner.token_to_kv_pool
        for layer_id in range(pool.start_layer, pool.start_layer + pool.layer_num):
            for buffer in (pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)):
                # PyTorch indexes FP8 tensors on some devices only, but bytes on all.
                rows = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
                rows.index_fill_(0, slots, 0)
