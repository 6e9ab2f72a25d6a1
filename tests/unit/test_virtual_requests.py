"""Virtual requests over a backend that plans and attends as SGLang's Triton backend does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowed_rig import LAYERS, Rig
from test_flashinfer_rows import some
from test_position_mask import slow_attention

from sglang_kvshare.attention.launches import Launch, Sees, in_runs
from sglang_kvshare.engine.virtual_requests import (
    KEY_BYTES,
    EntryLimits,
    VirtualRequests,
    entry_groups,
)

pytestmark = pytest.mark.unit


@dataclass
class ForwardMetadata:
    """Views of the backend's buffers, as in ``triton_backend.ForwardMetadata``."""

    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indices: torch.Tensor


class TritonLike:
    """The prefix of each entry is read from the pool, its own rows are those that are given.

    Buffers take as many entries as there may be requests, and the next plan writes over them.
    """

    def __init__(self, rig, entries):
        self.table = rig.backend.req_to_token_pool.req_to_token
        self.pool = rig.pool
        self.kv_indptr = torch.zeros(entries + 1, dtype=torch.int32)
        self.qo_indptr = torch.zeros(entries + 1, dtype=torch.int64)
        self.forward_metadata = "of the whole batch"
        self.plans = self.launches = 0

    def init_forward_metadata(self, batch):
        entries = batch.batch_size
        for lengths in (batch.extend_seq_lens, batch.extend_prefix_lens, batch.seq_lens):
            assert len(lengths) == entries
        assert batch.extend_seq_lens.tolist() == batch.extend_seq_lens_cpu
        assert batch.extend_prefix_lens.tolist() == batch.extend_prefix_lens_cpu
        assert (batch.extend_prefix_lens + batch.extend_seq_lens).tolist() == (
            batch.seq_lens_cpu.tolist()
        )
        assert batch.seq_lens_sum == int(batch.seq_lens.sum())
        assert batch.extend_num_tokens == sum(batch.extend_seq_lens_cpu)
        assert batch.extend_start_loc.tolist() == (
            (batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens).tolist()
        )
        ends = batch.positions[batch.extend_start_loc.long() + batch.extend_seq_lens - 1] + 1
        assert torch.equal(ends, batch.seq_lens)
        self.kv_indptr[1 : entries + 1] = batch.extend_prefix_lens.cumsum(0)
        self.qo_indptr[1 : entries + 1] = batch.extend_seq_lens.cumsum(0)
        self.forward_metadata = ForwardMetadata(
            self.kv_indptr[: entries + 1],
            self.qo_indptr[: entries + 1],
            torch.cat(
                [
                    self.table[row, :prefix]
                    for row, prefix in zip(
                        batch.req_pool_indices, batch.extend_prefix_lens_cpu, strict=True
                    )
                ]
            ),
        )
        self.plans += 1

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        assert not save_kv_cache
        planned = self.forward_metadata
        assert len(q) == len(k) == len(v) == int(planned.qo_indptr[-1])
        out = []
        for entry in range(batch.batch_size):
            rows = slice(*planned.qo_indptr[entry : entry + 2].tolist())
            begin, end = planned.kv_indptr[entry : entry + 2].tolist()
            slots = planned.kv_indices[begin:end].long()
            keys = torch.cat([self.pool.get_key_buffer(layer.layer_id)[slots], k[rows]])
            values = torch.cat([self.pool.get_value_buffer(layer.layer_id)[slots], v[rows]])
            queries = q[rows].view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            positions = torch.arange(len(slots), len(keys))
            out.append(slow_attention(queries, keys, values, positions, layer.scaling))
        self.launches += 1
        return torch.cat(out).flatten(1)


class Otherwise:
    """Where the limits do not allow entries."""

    def __init__(self):
        self.asked = 0

    def attend(self, narrowed, rows):
        self.asked += 1
        return torch.zeros(len(rows.q), 1)

    def end(self):
        pass


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 14)), min_size=1, max_size=4),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.integers(4, 40),
    st.integers(0, 1000),
)
def test_entries_attend_by_position_in_one_group_or_many(requests, share, capacity, seed):
    rig = Rig([start for start, _ in requests], [count for _, count in requests], seed)
    keep = some(rig, share, seed)
    # The last row of each request runs, so that none has a row that only carries it.
    keep[torch.tensor(rig.extend.counts).cumsum(0) - 1] = True
    backend = TritonLike(rig, capacity)
    rows = VirtualRequests(backend, EntryLimits(groups=100))
    narrowed = rig.narrowed(keep)
    for layer_id in range(LAYERS):
        given = rig.rows(narrowed, rig.layer(layer_id))
        torch.testing.assert_close(
            rows.attend(narrowed, given), rig.expected(narrowed, given), atol=1e-5, rtol=1e-5
        )
    (launch,) = in_runs(narrowed.kept.row_positions, narrowed.kept.counts).launches
    groups = -(-launch.entries // capacity)
    # Planned once a group, and not for each layer.
    assert backend.plans == groups
    assert backend.launches == groups * LAYERS
    rows.end()
    assert backend.forward_metadata == "of the whole batch"


def test_a_second_narrowing_is_planned_anew_and_the_stock_plan_comes_back():
    rig = Rig([3, 0], [20, 15])
    backend = TritonLike(rig, 64)
    rows = VirtualRequests(backend)
    keep = some(rig, 0.8, 1)
    keep[[19, 34]] = True
    for number in range(2):
        narrowed = rig.narrowed(keep)
        given = rig.rows(narrowed, rig.layer(number))
        torch.testing.assert_close(
            rows.attend(narrowed, given), rig.expected(narrowed, given), atol=1e-5, rtol=1e-5
        )
        keep = keep & some(rig, 0.6, 2)
        keep[[19, 34]] = True
    assert backend.plans == 2
    rows.end()
    assert backend.forward_metadata == "of the whole batch"
    # Nothing was planned: nothing is put back.
    backend.forward_metadata = "of the next batch"
    rows.end()
    assert backend.forward_metadata == "of the next batch"


def test_the_backend_s_buffers_are_shared_between_groups():
    """Control of the rig: without copies of them an earlier group reads a later one's entries."""
    rig = Rig([0], [16])
    backend = TritonLike(rig, 2)
    keep = torch.zeros(16, dtype=torch.bool)
    keep[[1, 4, 5, 9, 15]] = True
    narrowed = rig.narrowed(keep)
    rows = VirtualRequests(backend, EntryLimits(groups=9))
    given = rig.rows(narrowed, rig.layer(0))
    torch.testing.assert_close(rows.attend(narrowed, given), rig.expected(narrowed, given))
    first = rows._groups[0].metadata
    assert not torch.equal(first.qo_indptr, backend.qo_indptr)
    assert first.qo_indptr.data_ptr() != backend.qo_indptr.data_ptr()


@pytest.mark.parametrize(
    "limits", [EntryLimits(groups=1), EntryLimits(key_bytes=5 * 16 * KEY_BYTES - 1)]
)
def test_what_is_over_a_limit_attends_otherwise(limits):
    rig = Rig([0], [16])
    keep = torch.zeros(16, dtype=torch.bool)
    # Five runs, and buffers for four.
    keep[[1, 4, 6, 9, 15]] = True
    narrowed = rig.narrowed(keep)
    backend, otherwise = TritonLike(rig, 4), Otherwise()
    rows = VirtualRequests(backend, limits, otherwise)
    for layer_id in range(LAYERS):
        rows.attend(narrowed, rig.rows(narrowed, rig.layer(layer_id)))
    assert (otherwise.asked, backend.plans) == (LAYERS, 0)
    # The control: one run less, and they are entries.
    keep[4] = False
    narrowed = rig.narrowed(keep)
    given = rig.rows(narrowed, rig.layer(0))
    torch.testing.assert_close(rows.attend(narrowed, given), rig.expected(narrowed, given))
    assert otherwise.asked == LAYERS


def test_without_a_bound_plan_in_position_masks():
    """By itself it is the attention in PyTorch that takes over."""
    rig = Rig([2, 0], [14, 9])
    narrowed = rig.narrowed(some(rig, 0.5, 5))
    given = rig.rows(narrowed, rig.layer(1))
    rows = VirtualRequests(TritonLike(rig, 4), EntryLimits(key_bytes=0))
    torch.testing.assert_close(
        rows.attend(narrowed, given), rig.expected(narrowed, given), atol=1e-5, rtol=1e-5
    )


@given(st.integers(1, 200), st.one_of(st.none(), st.integers(1, 60)), st.integers(1, 8))
def test_groups_are_even_and_fit(entries, capacity, groups):
    ones = np.ones(entries, dtype=np.int64)
    launch = Launch(ones, np.arange(entries + 1), ones * 0, ones * 9, Sees.CAUSAL)
    cuts = entry_groups(launch, capacity, EntryLimits(groups=groups))
    needed = 1 if capacity is None else -(-entries // capacity)
    if needed > groups:
        assert cuts == []
        return
    sizes = np.diff(cuts)
    assert (cuts[0], cuts[-1], len(sizes)) == (0, entries, needed)
    assert sizes.max() - sizes.min() <= 1
    assert capacity is None or sizes.max() <= capacity
