"""What a sweep measures, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.plan import (
    Amount,
    Window,
    arrivals,
    auto_rates,
    make_specs,
    read_rates,
    rotated,
    windows_of,
)
from kvshare_eval.serving.record import RequestRecord, WindowRecord
from kvshare_eval.serving.sides import check_sides, read_urls, side_of
from kvshare_eval.serving.summary import line, summarize
from kvshare_eval.serving.tokens import Corpus

pytestmark = pytest.mark.unit

CORPUS = Corpus(lambda text: [1_000 + len(word) for word in text.split()], 50_000)


def test_sweeps_apply_to_the_workloads_that_have_the_option() -> None:
    specs = make_specs(["rag:pool=3", "no_reuse"], [0.25, 0.5], [100, 200])
    assert [spec.text for spec in specs] == [
        "rag:pool=3.0,prompt_tokens=100,share=0.25",
        "rag:pool=3.0,prompt_tokens=200,share=0.25",
        "rag:pool=3.0,prompt_tokens=100,share=0.5",
        "rag:pool=3.0,prompt_tokens=200,share=0.5",
        "no_reuse:prompt_tokens=100",
        "no_reuse:prompt_tokens=200",
    ]
    assert [spec.text for spec in make_specs(["agent"], [], [])] == ["agent"]


@pytest.mark.parametrize(
    ("names", "shares", "message"),
    [
        (["no_reuse"], [0.5], "a sweep of share: no workload of this run"),
        (["rag", "rag"], [], "workload rag is given twice"),
        (["rag", "rag:share=0.5"], [0.5], "rag:share=0.5 is given twice"),
    ],
)
def test_sweeps_that_mean_nothing(names: list[str], shares: list[float], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        make_specs(names, shares, [])


def test_rates() -> None:
    assert read_rates("auto") is None
    assert read_rates("0.5, 2,closed") == (0.5, 2.0, None)
    assert auto_rates(0.12345, [0.25, 2]) == (None, 0.0309, 0.247)
    for text in ("", "0", "-1", "fast", "1,1", "inf", "nan"):
        with pytest.raises(EvalError, match="--rates"):
            read_rates(text)


def test_keys_and_names() -> None:
    spec, trace = make_specs(["rag:share=0.5", "trace"], [], [])
    windows = [*windows_of(spec, (None, 0.25), 2), *windows_of(trace, (None, 0.25), 2)]
    assert [window.key("off") for window in windows] == [
        "rag:share=0.5/off/closed/0",
        "rag:share=0.5/off/0.25/0",
        "rag:share=0.5/off/closed/1",
        "rag:share=0.5/off/0.25/1",
        "trace/off/trace/0",
        "trace/off/trace/1",
    ]
    names = {window.name(seed) for window in windows for seed in (1, 2)}
    assert len(names) == 2 * len(windows)


def test_a_window_is_the_same_for_every_side_and_unlike_every_other() -> None:
    (spec,) = make_specs(["rag:prompt_tokens=60,passage_tokens=20"], [], [])
    amount = Amount(requests=None, seconds=20.0, closed=3)
    windows = [*windows_of(spec, (None, 0.5, 2.0), 3)]
    made = [arrivals(window, CORPUS, 7, amount) for window in windows]
    assert made == [arrivals(window, CORPUS, 7, amount) for window in windows]
    prompts = [one.prompt for each in made for one in each.load.requests]
    assert len(set(prompts)) == len(prompts)
    for window, each in zip(windows, made, strict=True):
        assert each.rate == window.rate
        if window.rate is None:
            assert each.due_s is None
            assert len(each.load.requests) == 3
        else:
            assert each.due_s is not None
            assert len(each.due_s) == len(each.load.requests)
            assert each.due_s[-1] < 20
    fixed = arrivals(Window(spec, 2.0, 0), CORPUS, 7, Amount(5, None, 3))
    assert len(fixed.load.requests) == 5


@given(st.permutations(["stock", "off", "reuse"]), st.integers(0, 9))
def test_each_side_is_first_once_in_as_many_repeats_as_sides(sides: list[str], repeat: int) -> None:
    orders = [rotated(sides, repeat + shift) for shift in range(len(sides))]
    for place in range(len(sides)):
        assert {order[place] for order in orders} == set(sides)


def test_sides_and_urls() -> None:
    assert check_sides(["reuse", "stock"]) == ("reuse", "stock")
    assert read_urls(["off=http://a:1/", "reuse=http://a:1"]) == {
        "off": "http://a:1",
        "reuse": "http://a:1",
    }
    assert check_sides(["off", "dhd@0.15"]) == ("off", "dhd@0.15")
    assert side_of("dhd@0.15") == (
        "kvshare",
        {"reuse": "approximate", "selector": "dhd", "recompute_ratio": 0.15},
    )
    for names in (["none"], ["off", "off"], []):
        with pytest.raises(EvalError, match="side"):
            check_sides(names)
    with pytest.raises(EvalError, match="ratio from 0 to 1"):
        check_sides(["dhd@2"])
    assert read_urls([]) == {}
    for items in (["http://a:1"], ["off=a:1"], ["off=http://a", "off=http://b"]):
        with pytest.raises(EvalError):
            read_urls(items)


def record(
    number: int, ttft_ms: float | None, lag_ms: float = 0.0, **more: object
) -> RequestRecord:
    values: dict[str, object] = {"report": {}, "error": None, **more}
    return RequestRecord(
        f"w/{number}", "w", number, 0.0, lag_ms, ttft_ms, (5.0,), ttft_ms, 100, 2, 10, **values
    )  # type: ignore[arg-type]


def test_the_summary_counts_good_requests_only() -> None:
    reused = {"prefix_tokens": 20, "reused_tokens": 60}
    records = [
        record(0, 100.0),
        record(1, 200.0, report=reused),
        record(2, 300.0),
        record(3, 9_000.0, error="broken off"),
    ]
    found = summarize(records, 2.0)
    assert (found.ttft_p50_ms, found.throughput, found.errors) == (200.0, 1.5, 1)
    assert found.prefix_share == pytest.approx((10 + 20 + 10) / 300)
    assert found.reused_share == pytest.approx(60 / 300)
    assert found.warning is None
    window = WindowRecord("rag/reuse/0.5/0", "rag", "reuse", 0.5, None, 100, 0, 2.0)
    assert line(window, found) == (
        "rag/reuse/0.5/0: 1.50 requests/s, TTFT 200 ms (p95 290), TBT 5 ms, "
        "prefix 13%, reused 20%, 1 failed"
    )
    assert "TTFT" not in line(window, summarize([record(0, None, error="x")], 1.0))


def test_a_late_client_is_told() -> None:
    assert summarize([record(0, 1_000.0, lag_ms=9.0)], 1.0).warning is None
    assert "11.0 ms late" in (summarize([record(0, 1_000.0, lag_ms=11.0)], 1.0).warning or "")
    # 9 ms are much of a TTFT of 100 ms.
    assert summarize([record(0, 100.0, lag_ms=9.0)], 1.0).warning
