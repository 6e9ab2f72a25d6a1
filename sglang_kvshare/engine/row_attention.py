"""How kept rows attend: what each attention backend's adapter does, and the one in plain PyTorch.

Keys and values of all rows that ran are in the pool before any of these is asked. An adapter lives
as long as its worker, and plans once for each set of rows, not for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_kvshare.attention.position_mask import attend
from sglang_kvshare.engine.kept_rows import KeptRows
from sglang_kvshare.engine.pool_reader import PoolReader


@dataclass(frozen=True, eq=False)
class Narrowed:
    """What stays the same from one narrowing to the next.

    Attributes:
        kept: the rows that run.
        batch: SGLang's ``ForwardBatch``, which tells of these rows already.
        slots: of each request's KV row, int64 ``[kv_length]``, on the device.
    """

    kept: KeptRows
    batch: Any
    slots: Sequence[torch.Tensor]
    reader: PoolReader


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The kept rows of one layer.

    Attributes:
        q: ``[rows, heads * head_dim]``.
        k, v: of the same rows, as the model gave them; read only.
        layer: the ``RadixAttention``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layer: Any

    def by_head(self) -> torch.Tensor:
        """``q`` as ``[rows, heads, head_dim]``."""
        return self.q.view(-1, self.layer.tp_q_head_num, self.layer.qk_head_dim)

    def output(self) -> torch.Tensor:
        """``[rows, heads, value_dim]``, still to be filled."""
        heads, dim = self.layer.tp_q_head_num, self.layer.v_head_dim
        return self.q.new_empty((self.q.shape[0], heads, dim))


class RowAttention(Protocol):
    """Attention of the kept rows, each over its request's KV row up to its own position."""

    def attend(self, narrowed: Narrowed, rows: LayerRows) -> torch.Tensor:
        """``[rows, heads * value_dim]``; ``narrowed`` is the same object until rows are dropped."""

    def end(self) -> None:
        """The forward is over: let go of what was planned for it."""


class PositionMaskRows:
    """Any backend's rows, in PyTorch: :func:`sglang_kvshare.attention.position_mask.attend`."""

    def attend(self, narrowed: Narrowed, rows: LayerRows) -> torch.Tensor:
        """See :class:`RowAttention`."""
        kept, reader, layer = narrowed.kept, narrowed.reader, rows.layer
        queries, out = rows.by_head(), rows.output()
        for number, slots in enumerate(narrowed.slots):
            part = kept.part(number)
            out[part] = attend(
                queries[part],
                reader.keys(layer, slots, rows.q.dtype),
                reader.values(layer, slots, rows.q.dtype),
                kept.positions[part],
                scale=layer.scaling,
                block_ends=kept.block_ends[number],
            )
        return out.flatten(1)

    def end(self) -> None:
        """Nothing is planned."""
