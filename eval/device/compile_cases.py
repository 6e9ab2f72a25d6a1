"""The kernels as they are launched for a Llama-3-8B layer, compiled without a device.

Eight key heads and 32 query heads of 128 dimensions, hidden states of 4,096, 32 probes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from sglang_kvshare.attention.kernels.device import (
    check_scores,
    compact_rows,
    copy_rotate,
    pack_mask,
)

#: Compute capabilities that are compiled for; the second has instructions for FP8.
CAPABILITIES = (80, 90)
_FP8_CAPABILITY = 89
_KV_HEADS, _QUERY_HEADS, _DIM, _HIDDEN, _PROBES = 8, 32, 128, 4096, 32
_TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel.

    Attributes:
        arguments: type of each argument that is not compiled in; pointers are aligned.
        constants: what is compiled in.
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int

    def compile(self, capability: int) -> CompiledKernel:
        """For an NVIDIA device of ``capability`` (80 for 8.0), or from Triton's cache."""
        names = self.kernel.arg_names
        signature = {name: self.arguments.get(name, "constexpr") for name in names}
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in self.arguments.items()
            if kind.startswith("*")
        }
        source = ASTSource(self.kernel, signature, self.constants, aligned)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": self.num_warps})


def cases(capability: int) -> Iterator[Case]:
    """What is launched on a device of ``capability``."""
    yield from _copies(capability)
    yield from _scores(capability)
    rows = compact_rows.constants((2 * _HIDDEN, 2 * _HIDDEN), (32, 32))
    pointers = dict.fromkeys(("first", "second", "first_out", "second_out"), "*bf16")
    strides = dict.fromkeys(("first_stride", "second_stride"), "i32")
    yield Case(
        "compact_rows bf16",
        compact_rows.compact_rows_kernel,
        {**pointers, "index": "*i64", **strides},
        rows,
        compact_rows.NUM_WARPS,
    )
    yield Case(
        "pack_mask",
        pack_mask.pack_mask_kernel,
        {**dict.fromkeys(("positions", "rows", "kv_lengths", "begins"), "*i64"), "bits": "*u8"},
        pack_mask.constants(),
        pack_mask.NUM_WARPS,
    )


def _copies(capability: int) -> Iterator[Case]:
    longs = (
        "key_offsets",
        "value_offsets",
        "table_offsets",
        "source_slots",
        "target_slots",
        "source_positions",
        "target_positions",
    )
    arguments = {
        # The kernel reads unsigned integers, whatever the pool's dtype.
        **dict.fromkeys(("keys", "values"), "*u8"),
        "tables": "*fp32",
        **dict.fromkeys(longs, "*i64"),
        "groups": "*i32",
        "squares": "*fp32",
        "faults": "*i32",
        "rows": "i32",
    }
    kinds = (
        ("bf16 neox", torch.bfloat16, _DIM // 2, False),
        ("bf16 gptj", torch.bfloat16, _DIM // 2, True),
        ("bf16 neox, half rotated", torch.bfloat16, _DIM // 4, False),
        ("fp32 neox", torch.float32, _DIM // 2, False),
        ("e4m3 neox", torch.float8_e4m3fn, _DIM // 2, False),
        ("e5m2 neox", torch.float8_e5m2, _DIM // 2, False),
    )
    for name, dtype, half, gptj in kinds:
        bits = dtype.itemsize == 1 and capability < _FP8_CAPABILITY
        yield Case(
            f"copy_rotate {name}",
            copy_rotate.copy_rotate_kernel,
            arguments,
            copy_rotate.constants(dtype, _KV_HEADS, _DIM, _DIM, half, gptj, bits),
            copy_rotate.NUM_WARPS,
        )


def _scores(capability: int) -> Iterator[Case]:
    splits, _ = check_scores.splits_of(_TOKENS)
    rows = _PROBES * _QUERY_HEADS // _KV_HEADS
    pools = (
        ("bf16", torch.bfloat16, "*bf16"),
        ("bf16, pool e4m3", torch.float8_e4m3fn, "*u8"),
    )
    for name, pool_dtype, stored in pools:
        bits = pool_dtype.itemsize == 1 and capability < _FP8_CAPABILITY
        common = check_scores.constants(
            torch.bfloat16,
            pool_dtype,
            _QUERY_HEADS,
            _KV_HEADS,
            _DIM,
            _DIM,
            bits,
            interpreted=False,
        )
        tensors = {
            **dict.fromkeys(("query", "fresh_keys"), "*bf16"),
            "stored_keys": stored,
            **dict.fromkeys(("slots", "probe_rows", "probe_positions"), "*i64"),
            "fresh_rows": "*i32",
            "sums": "*fp32",
            **dict.fromkeys(("query_stride", "key_stride", "rows"), "i32"),
            **dict.fromkeys(("scale", "key_scale"), "fp32"),
        }
        yield Case(
            f"check_scores normalisers {name}",
            check_scores.normalisers_kernel,
            {**tensors, **dict.fromkeys(("tokens", "split_tokens"), "i32")},
            {**common, **check_scores.normaliser_constants(rows)},
            check_scores.NUM_WARPS,
        )
        yield Case(
            f"check_scores scores {name}",
            check_scores.scores_kernel,
            {
                **tensors,
                "fresh_values": "*bf16",
                "stored_values": stored,
                "reused": "*i64",
                "out": "*fp32",
                **dict.fromkeys(("value_stride", "count", "splits"), "i32"),
                "value_scale": "fp32",
            },
            {**common, **check_scores.score_constants(rows, _DIM, splits)},
            check_scores.SCORE_WARPS,
        )
