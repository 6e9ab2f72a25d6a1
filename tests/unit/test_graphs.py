"""Captured graphs: bypassed where rows are narrowed, and there again behind it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvshare.engine.graphs import check_graphs, most_decode_rows, without_prefill_graphs
from sglang_kvshare.engine.seams import SeamError
from sglang_kvshare.scheduling.refresh_pace import NO_LIMIT, RefreshPace


def test_prefill_graphs_are_left_out_and_come_back():
    graphs = object()
    runner = SimpleNamespace(prefill_cuda_graph_runner=graphs)
    with without_prefill_graphs(runner):
        assert runner.prefill_cuda_graph_runner is None
    assert runner.prefill_cuda_graph_runner is graphs
    with pytest.raises(RuntimeError), without_prefill_graphs(runner):
        raise RuntimeError
    assert runner.prefill_cuda_graph_runner is graphs


def test_where_there_are_none_nothing_changes():
    runner = SimpleNamespace(prefill_cuda_graph_runner=None)
    with without_prefill_graphs(runner):
        assert runner.prefill_cuda_graph_runner is None
    assert runner.prefill_cuda_graph_runner is None


def test_a_runner_that_keeps_its_graphs_elsewhere_is_refused():
    check_graphs(SimpleNamespace(prefill_cuda_graph_runner=None, decode_cuda_graph_capture_bs=[]))
    with pytest.raises(SeamError, match="prefill_cuda_graph_runner"):
        check_graphs(SimpleNamespace(decode_cuda_graph_capture_bs=[]))
    with pytest.raises(SeamError, match="decode_cuda_graph_capture_bs"):
        check_graphs(SimpleNamespace(prefill_cuda_graph_runner=None))


@pytest.mark.parametrize(("captured", "most"), [([1, 2, 8], 8), ([1, 64], 24), ([], 24)])
def test_refresh_rows_stay_within_what_was_captured(captured, most):
    runner = SimpleNamespace(max_running_requests=24, decode_cuda_graph_capture_bs=captured)
    assert most_decode_rows(runner) == most
    pace = RefreshPace(NO_LIMIT, most)
    assert [pace.allowance(rows, 100) for rows in (1, 5, 30)] == [most - 1, max(0, most - 5), 0]


def test_ranks_that_measure_different_times_refresh_as_many_rows():
    paces = [RefreshPace(0.25, 64, by_time=False) for _ in range(2)]
    told = []
    for step in range(40):
        rows = 4 + step // 10
        allowed = [pace.allowance(rows, 8) for pace in paces]
        told.append(allowed)
        for pace, count, ms in zip(paces, allowed, (3.0 + step, 90.0 / (1 + step)), strict=True):
            pace.observe(rows, count, ms)
    assert all(one == other for one, other in told)
    assert sum(one for one, _ in told) > 20
    # The control: by time they would part.
    paces = [RefreshPace(0.25, 64) for _ in range(2)]
    told = []
    for step in range(40):
        allowed = [pace.allowance(4, 8) for pace in paces]
        told.append(allowed)
        for pace, count, ms in zip(paces, allowed, (3.0, 3.0 + 2.0 * (step % 3)), strict=True):
            pace.observe(4, count, ms + count)
    assert any(one != other for one, other in told)


def test_without_times_nobody_is_slowed_who_was_promised_a_time():
    pace = RefreshPace(0.25, 64, by_time=False)
    for _ in range(20):
        pace.observe(4, 0, 1.0)
    assert pace.allowance(4, 8, tbt_slo_ms=50.0) == 0
    assert sum(pace.allowance(4, 8) for _ in range(8)) > 0
