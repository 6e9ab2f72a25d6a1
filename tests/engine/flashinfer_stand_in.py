"""FlashInfer's paged prefill wrapper, on a CPU and in PyTorch: the same signatures, the same rules.

What it computes is written down from FlashInfer 0.7.2's ``prefill.py``, ``page.py`` and
``variants.cuh``: entries, pages, the causal mask aligned at the end, the bits of a packed mask, the
base of the logarithms, and where a plan with a packed mask takes its entries' masks from.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """One plan at a time. ``plans`` and ``runs`` count; ``made`` holds all wrappers."""

    made: ClassVar[list[BatchPrefillWithPagedKVCacheWrapper]] = []

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        assert kv_layout == "NHD"
        # No other backend of theirs takes a custom mask and a page of one slot.
        assert backend == "fa2"
        assert not use_cuda_graph
        self.device = float_workspace_buffer.device
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf
        self.plans = self.runs = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        entries = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == entries + 1
        assert len(paged_kv_last_page_len) == entries
        for indices in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert indices.dtype == torch.int32
        # What is on the device would be waited for.
        for host in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert host.device.type == "cpu"
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_vo in (None, head_dim_qk)
        assert custom_mask is None, "the adapter packs its masks itself"
        assert (pos_encoding_mode, window_left, logits_soft_cap) == ("NONE", -1, None)
        # No mask of an earlier plan stays.
        self._custom_mask_buf = self._mask_indptr_buf = None
        if packed_custom_mask is not None:
            assert packed_custom_mask.dtype == torch.uint8
            self._custom_mask_buf = packed_custom_mask
            # `_compute_page_mask_indptr`: of bits. With `custom_mask` it becomes one of bytes,
            # with a mask that is packed already it does not.
            keys = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            bits = qo_indptr.diff() * keys
            self._mask_indptr_buf = torch.cat([bits.new_zeros(1), bits.cumsum(0)]).to(torch.int32)
        self._qo_indptr_buf = qo_indptr
        self._paged_kv_indptr_buf = paged_kv_indptr
        self._paged_kv_indices_buf = paged_kv_indices
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len
        self._cached_q_data_type = q_data_type
        self._cached_kv_data_type = q_data_type if kv_data_type is None else kv_data_type
        self._heads = (num_qo_heads, num_kv_heads)
        self._page_size, self._causal, self._sm_scale = page_size, causal, sm_scale
        self.plans += 1

    begin_forward = plan

    def forward(
        self,
        q,
        paged_kv_cache,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        k_scale=None,
        v_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
    ):
        """The older name; it overrides what was planned."""
        self._causal, self._sm_scale = causal, sm_scale
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        assert (lse_base, lse_layout) == ("log2", "NH")
        k_cache, v_cache = (_pages(cache) for cache in paged_kv_cache)
        assert q.dtype == self._cached_q_data_type
        assert k_cache.dtype == self._cached_kv_data_type
        assert q.shape[0] == int(self._qo_indptr_buf[-1])
        assert q.shape[1] == self._heads[0]
        assert k_cache.shape[1:3] == (self._page_size, self._heads[1])
        scale = q.shape[-1] ** -0.5 if self._sm_scale is None else self._sm_scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else factor
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:2], dtype=torch.float32)
        for entry in range(len(self._qo_indptr_buf) - 1):
            rows = slice(int(self._qo_indptr_buf[entry]), int(self._qo_indptr_buf[entry + 1]))
            slots = self._slots(entry)
            keys, values = (
                cache.flatten(0, 1)
                .float()[slots]
                .repeat_interleave(self._heads[0] // self._heads[1], 1)
                for cache in (k_cache, v_cache)
            )
            logits = torch.einsum("rhd,khd->rhk", q[rows].float(), keys) * scale
            hidden = ~self._mask(entry, logits.shape[0], len(slots))
            logits = logits.masked_fill(hidden[:, None], float("-inf"))
            sums[rows] = logits.logsumexp(-1) / math.log(2) if len(slots) else float("-inf")
            # Without a key nothing is said of the output.
            told = torch.einsum("rhk,khd->rhd", logits.softmax(-1), values)
            out[rows] = told.to(q.dtype) if len(slots) else float("nan")
        if v_scale is not None:
            out *= v_scale
        self.runs += 1
        return (out, sums) if return_lse else out

    def _slots(self, entry: int) -> torch.Tensor:
        begin, end = self._paged_kv_indptr_buf[entry : entry + 2].tolist()
        if begin == end:
            return torch.empty(0, dtype=torch.int64)
        pages = self._paged_kv_indices_buf[begin:end].to(torch.int64)
        slots = pages[:, None] * self._page_size + torch.arange(self._page_size)
        last = int(self._paged_kv_last_page_len_buf[entry])
        return slots.flatten()[: (end - begin - 1) * self._page_size + last]

    def _mask(self, entry: int, rows: int, keys: int) -> torch.Tensor:
        """bool ``[rows, keys]``: what is seen."""
        if self._custom_mask_buf is not None:
            offset = torch.arange(rows * keys)
            begin = int(self._mask_indptr_buf[entry])
            # Reading behind the end raises here; on a device it is an illegal access, or not.
            byte = self._custom_mask_buf[begin + offset // 8].to(torch.int64)
            return ((byte >> (offset % 8)) & 1).bool().view(rows, keys)
        if self._causal:
            return torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows)
        return torch.ones(rows, keys, dtype=torch.bool)


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """``[pages, page_size, heads, dim]``; three dimensions are pages of one slot."""
    return cache.unsqueeze(1) if cache.dim() == 3 else cache


def made() -> list[Any]:
    """All wrappers, and forget them."""
    wrappers = list(BatchPrefillWithPagedKVCacheWrapper.made)
    BatchPrefillWithPagedKVCacheWrapper.made.clear()
    return wrappers
