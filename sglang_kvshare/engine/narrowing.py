"""Running only some rows of an extend, fewer and fewer from layer to layer, in a stock forward.

    rows of the extend     0 1 2 3 4 5 6 7 8 9        layers in which all rows run
    spared                     x x x     x x
    kept                   0 1       5 6     9        layers from the next one on

Which rows run is the business of a program. It may say before a layer which rows go on, or in its
attention, where it may look at queries, keys and values: then these are still written for all rows
that ran, and attention and what follows is computed for those that go on.

Seams: the decoder layers are called as ``layer(positions, hidden_states, forward_batch, ...)``;
``residual_batch.to_pp`` and ``attn_boundary.from_pp`` take the residual pair apart and together;
``ForwardBatch.residual_stream`` holds the residual alone while a layer's attention runs;
``ForwardContext.attn_backend`` is what ``RadixAttention.forward`` calls. Nothing is installed while
no extend is narrowed. How the rows that are left attend is the business of an adapter
(:mod:`sglang_kvshare.engine.row_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_kvshare.attention.kernels.compact_rows import compact_rows
from sglang_kvshare.attention.layerwise_copy import Copying
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.engine.attention_stand_in import AttentionStandIn
from sglang_kvshare.engine.kept_rows import KeptRows
from sglang_kvshare.engine.pool_reader import PoolReader
from sglang_kvshare.engine.row_attention import (
    LayerRows,
    Narrowed,
    PositionMaskRows,
    RowAttention,
)
from sglang_kvshare.engine.support import decoder_layers


@dataclass(frozen=True)
class Look:
    """What a layer has before it writes to the pool: of the rows that run, keys rotated.

    Attributes:
        q, k, v: ``[rows, heads, dim]``.
        layer: the ``RadixAttention``.
        slots: of each request's KV row, int64 ``[kv_length]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layer: Any
    reader: PoolReader
    slots: Sequence[torch.Tensor]


class Program(Protocol):
    """Says which rows of a batch run."""

    #: Tokens of each request's KV row, this extend included.
    kv_lengths: list[int]
    #: The rows that run now; ``None`` while all do.
    current: KeptRows | None

    def narrow(self, layer: int) -> torch.Tensor | None:
        """Called before each layer: the rows that go on, as indices into those that ran until now
        (int64, on the device), or ``None`` when all do. Sets ``current``."""

    def looks(self, layer: int) -> bool:
        """Whether :meth:`look` is to be called in this layer."""

    def look(self, look: Look) -> torch.Tensor | None:
        """Learn what to keep; the rows that go on from here, as :meth:`narrow` tells them."""


@contextmanager
def narrowed(
    model_runner: Any, program: Program, rows: RowAttention, copying: Copying | None = None
) -> Iterator[None]:
    """Run the extend inside this context by ``program``; removes everything on leaving it.

    Args:
        rows: how the rows that are left attend.
        copying: what the layers wait for.
    """
    copying = copying or Copying()
    attention = NarrowedAttention(model_runner.attn_backend, program, rows)
    with ExitStack() as stack:
        stack.callback(rows.end)
        for number, layer in enumerate(decoder_layers(model_runner.model)):
            handle = layer.register_forward_pre_hook(
                _hook(program, number, copying), with_kwargs=True
            )
            stack.callback(handle.remove)
        stack.enter_context(forward_context(ForwardContext(attn_backend=attention)))
        yield


def _hook(program: Program, number: int, copying: Copying) -> Any:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copying.before(number)
        positions, hidden_states, forward_batch = args[:3]
        index = program.narrow(number)
        kept = program.current
        if kept is None:
            return None
        if index is not None:
            hidden_states = _narrow_hidden(layer, hidden_states, forward_batch, index)
            _narrow_batch(forward_batch, kept)
        return (kept.positions.to(positions.dtype), hidden_states, forward_batch, *args[3:]), kwargs

    return hook


def _narrow_hidden(layer: Any, hidden: Any, forward_batch: Any, rows: torch.Tensor) -> Any:
    stream = forward_batch.residual_stream
    if stream.residual is None and stream.pending is None:
        # Before layer 0 the hidden states are the embeddings and there is no residual yet.
        return hidden.index_select(0, rows)
    exported = residual_batch.to_pp(hidden, forward_batch)
    tensors = dict(exported.tensors)
    if len(tensors) == 2:
        tensors = dict(zip(tensors, compact_rows(*tensors.values(), rows), strict=True))
    else:
        tensors = {name: value.index_select(0, rows) for name, value in tensors.items()}
    return layer.attn_boundary.from_pp(PPProxyTensors(tensors), forward_batch)


def _narrow_batch(forward_batch: Any, kept: KeptRows) -> None:
    """Make the batch's own description fit, for the layers and for the logits at the end.

    This ``ForwardBatch`` is a copy that the eager runner made for one forward.
    """
    starts, before = (
        forward_batch.extend_logprob_start_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
    )
    if starts is not None:
        # Rows from a request's log-probability start on are all kept, so that the distance from
        # the start to the end stays.
        forward_batch.extend_logprob_start_lens_cpu = [
            count - (rows - start)
            for count, rows, start in zip(kept.counts, before, starts, strict=True)
        ]
    forward_batch.positions = kept.positions
    forward_batch.out_cache_loc = kept.cache_loc
    (counts,) = upload(kept.cache_loc.device, kept.counts)
    forward_batch.extend_seq_lens = counts.to(torch.int32)
    forward_batch.extend_seq_lens_cpu = list(kept.counts)
    forward_batch.extend_num_tokens = len(kept.rows)


class NarrowedAttention(AttentionStandIn):
    """An attention backend for one forward: stock while all rows run, and by an adapter after."""

    def __init__(self, stock: Any, program: Program, rows: RowAttention | None = None) -> None:
        super().__init__(stock)
        self._program = program
        self._rows = rows or PositionMaskRows()
        self._slots: list[torch.Tensor] | None = None
        self._narrowed: Narrowed | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``; ``q`` is ``[k, heads * head_dim]``."""
        if self._slots is None:
            # Read once, for all layers.
            indices = forward_batch.req_pool_indices_cpu
            if indices is None:
                indices = forward_batch.req_pool_indices
            self._slots = self._reader.rows(indices, self._program.kv_lengths)
        index = None
        if self._program.looks(layer.layer_id):
            heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
            parts = (x.view(x.shape[0], n, -1) for x, n in zip((q, k, v), heads, strict=True))
            index = self._program.look(Look(*parts, layer, self._reader, self._slots))
        kept = self._program.current
        if kept is None:
            return self._stock.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if save_kv_cache:
            if self._reader.scales(layer)[0] is None:
                self._write(layer, forward_batch, k, v)
            else:
                # Dividing by a scale happens in place, and the adapter gets keys and values too.
                self._write(layer, forward_batch, k.clone(), v.clone())
        if index is not None:
            # Keys and values of all rows are written; what follows in this layer is for fewer.
            stream = forward_batch.residual_stream
            q, stream.residual = compact_rows(q, stream.residual, index)
            rows = compact_rows(k.flatten(1), v.flatten(1), index)
            k, v = (x.view(-1, *was.shape[1:]) for x, was in zip(rows, (k, v), strict=True))
            _narrow_batch(forward_batch, kept)
        if self._narrowed is None or self._narrowed.kept is not kept:
            self._narrowed = Narrowed(kept, forward_batch, self._slots, self._reader)
        return self._rows.attend(self._narrowed, LayerRows(q, k, v, layer))
