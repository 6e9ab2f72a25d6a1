"""Kept rows of a batch over a paged pool, without SGLang, and what they must attend to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from test_position_mask import slow_attention

from sglang_kvshare.engine.kept_rows import Extend, KeptRows
from sglang_kvshare.engine.pool_reader import PoolReader
from sglang_kvshare.engine.row_attention import LayerRows, Narrowed

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 3
SCALE = 0.3


class Pool:
    """As much of ``MHATokenToKVPool`` as is read; slots are handed out at random."""

    def __init__(self, slots: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        self.dtype = dtype
        shape = (LAYERS, slots, KV_HEADS, DIM)
        self.keys, self.values = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer_id], self.values[layer_id]


@dataclass
class ForwardBatch:
    """The fields of SGLang's that tell a backend of entries (``seams.SEAMS`` has them all)."""

    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    orig_seq_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_num_tokens: int
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_start_loc: torch.Tensor
    req_pool_indices_cpu: torch.Tensor | None = None


class Rig:
    """A batch of extends whose rows are narrowed again and again.

    Args:
        starts, counts: first position and number of rows of each request that runs.
    """

    def __init__(
        self,
        starts: list[int],
        counts: list[int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.pool = Pool(sum(lengths) + 1, self.generator, dtype)
        slots = torch.randperm(sum(lengths), generator=self.generator) + 1
        rows = torch.randperm(len(lengths) + 2, generator=self.generator)[: len(lengths)]
        table = torch.zeros((len(lengths) + 2, max(lengths)), dtype=torch.int32)
        for row, part in zip(rows.tolist(), slots.split(lengths), strict=True):
            table[row, : len(part)] = part.to(torch.int32)
        self.backend: Any = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            workspace_buffer=torch.empty(16, dtype=torch.uint8),
            prefill_backend="fa2",
            prefill_split_tile_size=None,
        )
        self.reader = PoolReader(self.backend)
        cache_loc = torch.cat(
            [
                table[row, start : start + count]
                for row, start, count in zip(rows, starts, counts, strict=True)
            ]
        ).long()
        self.extend = Extend(starts, counts, cache_loc)
        seq_lens, extend = torch.tensor(lengths), torch.tensor(counts, dtype=torch.int32)
        prefixes = torch.tensor(starts, dtype=torch.int32)
        self.batch = ForwardBatch(
            batch_size=len(lengths),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=sum(lengths),
            orig_seq_lens=seq_lens,
            positions=torch.empty(0, dtype=torch.int64),
            out_cache_loc=cache_loc,
            extend_num_tokens=sum(counts),
            extend_seq_lens=extend,
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=prefixes,
            extend_prefix_lens_cpu=starts,
            extend_start_loc=extend.cumsum(0) - extend,
        )
        self.slots = self.reader.rows(rows, lengths)

    def narrowed(self, keep: torch.Tensor) -> Narrowed:
        """The rows that bool ``[rows]`` marks."""
        kept: KeptRows = self.extend.keep(keep.numpy())
        return Narrowed(kept, self.batch, self.slots, self.reader)

    def layer(self, layer_id: int, **more: Any) -> Any:
        scales = {"k_scale": None, "v_scale": None, "k_scale_float": None, "v_scale_float": None}
        return SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=HEADS,
            tp_k_head_num=KV_HEADS,
            tp_v_head_num=KV_HEADS,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=SCALE,
            **(scales | more),
        )

    def rows(self, narrowed: Narrowed, layer: Any) -> LayerRows:
        """Random queries; keys and values as the pool has them, which they were written to."""
        kept = narrowed.kept
        q = torch.randn((len(kept.rows), HEADS * DIM), generator=self.generator)
        # A carrier's are in the padding slot, and nobody reads them.
        k, v = (
            buffer[layer.layer_id].float()[kept.cache_loc].clone()
            for buffer in (self.pool.keys, self.pool.values)
        )
        return LayerRows(q, k, v, layer)

    def expected(
        self, narrowed: Narrowed, rows: LayerRows, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> torch.Tensor:
        """By the definition: the row at position p sees the keys up to p."""
        layer, out = rows.layer, []
        for number, slots in enumerate(narrowed.slots):
            part = narrowed.kept.part(number)
            out.append(
                slow_attention(
                    rows.by_head()[part],
                    self.pool.keys[layer.layer_id].float()[slots] * k_scale,
                    self.pool.values[layer.layer_id].float()[slots] * v_scale,
                    narrowed.kept.positions[part],
                    layer.scaling,
                )
            )
        return torch.cat(out).flatten(1)
