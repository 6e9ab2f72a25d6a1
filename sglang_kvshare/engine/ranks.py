"""What tensor-parallel ranks must agree on: each has the keys and values of some heads only.

All ranks get the same requests in the same order and plan alike. What one measures on its own heads
is added up before anything is chosen by it.

Seam: ``runtime_context.get_parallel().attn_tp_group``, a ``GroupCoordinator`` with process groups
of PyTorch: ``device_group``, which works behind what a stream was given, and ``cpu_group``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The ranks that share the heads of one request.

    Args:
        device_group, cpu_group: process groups of the same ranks; ``None`` for one rank.
    """

    def __init__(self, device_group: Any = None, cpu_group: Any = None) -> None:
        self._device_group, self._cpu_group = device_group, cpu_group

    @property
    def alone(self) -> bool:
        return self._device_group is None

    def add_up(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place and the same bits on each. All must come here."""
        if self._device_group is not None:
            dist.all_reduce(mine, group=self._device_group)
        return mine

    def all_say(self, mine: bool) -> bool:
        """Whether every rank says so; waits for no stream. All must come here."""
        if self._cpu_group is None:
            return mine
        said = torch.tensor([int(mine)], dtype=torch.int32)
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._cpu_group)
        return bool(said.item())


def ranks_of_this_process() -> Ranks:
    """Those that SGLang has set up."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().attn_tp_group
    return Ranks() if group.world_size == 1 else Ranks(group.device_group, group.cpu_group)
