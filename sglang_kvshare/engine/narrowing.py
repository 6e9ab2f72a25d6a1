"""Running only some rows of an extend from a given layer on, inside a stock forward.

    rows of the extend     0 1 2 3 4 5 6 7 8 9        layers before `first_layer`: all rows
    spared                     x x x     x x
    kept                   0 1       5 6     9        layers from it on: kept rows only

Seams: the decoder layers are called as ``layer(positions, hidden_states, forward_batch, ...)``;
``residual_batch.to_pp`` and ``attn_boundary.from_pp`` take the residual pair apart and together;
``ForwardContext.attn_backend`` is what ``RadixAttention.forward`` calls; ``RadixAttention.k_scale``
and ``v_scale`` belong to an FP8 pool. Nothing is installed while no extend is narrowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_kvshare.attention.position_mask import attend, last_positions
from sglang_kvshare.engine.placement import gather
from sglang_kvshare.engine.support import decoder_layers

#: The backend that writes to an FP8 pool and reads from it without the layer's scales.
_UNSCALED_BACKEND = "TorchNativeAttnBackend"


@dataclass(frozen=True)
class KeptRows:
    """The rows of a batch that run from the first narrowed layer on.

    Attributes:
        rows: int64 ``[k]``, indices into the extend's rows, ascending.
        positions: int64 ``[k]``, position of each in its request.
        cache_loc: int64 ``[k]``, slot that each writes its KV to.
        counts: kept rows of each request, all above 0.
        extend_counts: rows of each request before narrowing.
        kv_lengths: tokens of each request's KV row, this extend included.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor
    counts: list[int]
    extend_counts: list[int]
    kv_lengths: list[int]


@contextmanager
def narrowed(model_runner: Any, kept: KeptRows, first_layer: int) -> Iterator[None]:
    """Narrow the extend that runs inside this context; removes everything on leaving it."""
    attention = NarrowedAttention(model_runner.attn_backend, kept, first_layer)
    layers = list(decoder_layers(model_runner.model))
    with ExitStack() as stack:
        for number in range(first_layer, len(layers)):
            handle = layers[number].register_forward_pre_hook(
                _narrow_hook(kept, first=number == first_layer), with_kwargs=True
            )
            stack.callback(handle.remove)
        stack.enter_context(forward_context(ForwardContext(attn_backend=attention)))
        yield


def _narrow_hook(kept: KeptRows, *, first: bool) -> Any:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, hidden_states, forward_batch = args[:3]
        if first:
            hidden_states = _narrow_hidden(layer, hidden_states, forward_batch, kept.rows)
            _narrow_batch(forward_batch, kept)
        return (kept.positions.to(positions.dtype), hidden_states, forward_batch, *args[3:]), kwargs

    return hook


def _narrow_hidden(layer: Any, hidden: Any, forward_batch: Any, rows: torch.Tensor) -> Any:
    stream = forward_batch.residual_stream
    if stream.residual is None and stream.pending is None:
        # Before layer 0 the hidden states are the embeddings and there is no residual yet.
        return hidden.index_select(0, rows)
    exported = residual_batch.to_pp(hidden, forward_batch)
    tensors = {name: value.index_select(0, rows) for name, value in exported.tensors.items()}
    return layer.attn_boundary.from_pp(PPProxyTensors(tensors), forward_batch)


def _narrow_batch(forward_batch: Any, kept: KeptRows) -> None:
    """Make the batch's own description fit, for the layers and for the logits at the end.

    This ``ForwardBatch`` is a copy that the eager runner made for one forward.
    """
    starts = forward_batch.extend_logprob_start_lens_cpu
    if starts is not None:
        # Rows from a request's log-probability start on are all kept, so that the distance from
        # the start to the end stays.
        forward_batch.extend_logprob_start_lens_cpu = [
            count - (extend - start)
            for count, extend, start in zip(kept.counts, kept.extend_counts, starts, strict=True)
        ]
    forward_batch.positions = kept.positions
    forward_batch.out_cache_loc = kept.cache_loc
    forward_batch.extend_seq_lens = torch.tensor(
        kept.counts, dtype=torch.int32, device=kept.rows.device
    )
    forward_batch.extend_seq_lens_cpu = list(kept.counts)
    forward_batch.extend_num_tokens = len(kept.rows)


class NarrowedAttention:
    """An attention backend for one forward: stock before ``first_layer``, by position after.

    Everything else that SGLang asks of a backend is answered by the stock one.
    """

    def __init__(self, stock: Any, kept: KeptRows, first_layer: int) -> None:
        self._stock = stock
        self._kept = kept
        self._first_layer = first_layer
        self._scaled = type(stock).__name__ != _UNSCALED_BACKEND
        self._kv_rows: list[torch.Tensor] | None = None
        self._block_ends = [last_positions(part) for part in kept.positions.split(kept.counts)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

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
        if layer.layer_id < self._first_layer:
            return self._stock.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        pool = self._stock.token_to_kv_pool
        k_scale, v_scale = self._scales(layer, pool)
        if save_kv_cache:
            # Dividing by a scale happens in place; the narrowed rows are nobody else's.
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            pool.set_kv_buffer(layer, where, k, v, k_scale, v_scale)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        begin = 0
        for number, slots in enumerate(self._slots(forward_batch)):
            end = begin + self._kept.counts[number]
            out[begin:end] = attend(
                queries[begin:end],
                _read(keys, slots, q.dtype, k_scale),
                _read(values, slots, q.dtype, v_scale),
                self._kept.positions[begin:end],
                scale=layer.scaling,
                block_ends=self._block_ends[number],
            )
            begin = end
        return out.view(q.shape[0], -1)

    def _scales(self, layer: Any, pool: Any) -> tuple[Any, Any]:
        """What the stock backend multiplies stored keys and values by; ``None`` for nothing."""
        if not self._scaled or pool.dtype.itemsize > 1:
            return None, None
        return layer.k_scale, layer.v_scale

    def _slots(self, forward_batch: Any) -> list[torch.Tensor]:
        """The KV row of each request, ``[seq_len]``; read once, for all layers."""
        if self._kv_rows is None:
            table = self._stock.req_to_token_pool.req_to_token
            indices = forward_batch.req_pool_indices.tolist()
            self._kv_rows = [
                table[index, :length].to(torch.int64)
                for index, length in zip(indices, self._kept.kv_lengths, strict=True)
            ]
        return self._kv_rows


def _read(buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: Any) -> Any:
    """The values of ``slots`` in the dtype of the computation, FP8 brought back to its scale."""
    values = gather(buffer, slots)
    if scale is None:
        return values.to(dtype)
    return values.float().mul_(scale).to(dtype)
