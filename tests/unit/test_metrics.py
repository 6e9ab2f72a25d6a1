"""What is counted, where it shows, and that counting never harms."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_kvshare.engine import metrics as module
from sglang_kvshare.engine.metrics import (
    SERIES,
    SOURCES,
    STEPS,
    Exporter,
    IndexSize,
    Metrics,
)
from sglang_kvshare.request import REASONS, ReuseReport

pytestmark = pytest.mark.unit
LABELS = {"model_name": "tiny", "tp_rank": "0"}
SIZE = IndexSize(tokens=1200, namespaces=2, entries=1300, bytes=2_400_000, donor_locks=3, failed=0)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(text: str | bytes) -> dict[tuple, float]:
    """(name, own label values) -> value; fails where a shared label is missing."""
    text = text.decode() if isinstance(text, bytes) else text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = dict(sample.labels)
            assert {name: labels.pop(name) for name in LABELS} == LABELS
            found[(sample.name, *sorted(labels.items()))] = sample.value
    return found


def exported(registry) -> dict[tuple, float]:
    return samples(generate_latest(registry))


def assert_all_present_with_zero(found: dict[tuple, float]) -> None:
    for reason in REASONS:
        for decision in reason.decisions:
            key = ("decision", decision), ("reason", reason.name)
            assert found["kvshare:requests_total", *key] == 0
    for source in SOURCES:
        assert found["kvshare:prompt_tokens_total", ("source", source)] == 0
    for step in STEPS:
        assert found["kvshare:faults_total", ("step", step)] == 0
    for series in SERIES:
        mine = [value for key, value in found.items() if key[0].startswith(series.name)]
        assert mine, series.name
        assert not any(mine), series.name


def test_every_series_is_there_with_zero_before_anything_happened(registry):
    Exporter(LABELS, registry)
    found = exported(registry)
    assert_all_present_with_zero(found)
    assert {key[0] for key in found if key[0].startswith("kvshare:")} == {key[0] for key in found}


def test_the_files_of_the_multiprocess_directory_hold_the_zeros_too(tmp_path):
    """SGLang's server process reads what a scheduler process wrote."""
    write = f"from {module.__name__} import Exporter; Exporter({LABELS!r})"
    read = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", write], env=env, check=True)
    done = subprocess.run(
        [sys.executable, "-c", read], env=env, check=True, capture_output=True, text=True
    )
    assert_all_present_with_zero(samples(done.stdout))


counts = st.integers(0, 5000)
reports = st.builds(
    ReuseReport,
    prefix_tokens=counts,
    reused_tokens=counts,
    recomputed_tokens=counts,
    new_tokens=counts,
    donors=st.integers(0, 9),
    decision=st.sampled_from(("reuse", "none")),
    reason=st.sampled_from([reason.name for reason in REASONS]),
)


def tokens_of(report: ReuseReport, source: str) -> int:
    """By hand; a third of what was reused was an approximate prefix."""
    branch = report.reused_tokens // 3
    if source == "approximate_prefix":
        return branch
    return getattr(report, f"{source}_tokens") - (branch if source == "reused" else 0)


@settings(deadline=None, max_examples=50)
@given(st.lists(reports, max_size=20))
def test_the_counters_equal_a_count_by_hand(given_reports):
    registry = CollectorRegistry()
    metrics = Metrics(Exporter(LABELS, registry))
    plain = Metrics()
    for report in given_reports:
        metrics.prefill(report, report.reused_tokens // 3)
        plain.prefill(report, report.reused_tokens // 3)
    found = exported(registry)
    for key, value in found.items():
        if key[0] == "kvshare:requests_total":
            assert value == sum(
                ("decision", report.decision) in key and ("reason", report.reason) in key
                for report in given_reports
            )
        elif key[0] == "kvshare:prompt_tokens_total":
            source = dict(key[1:])["source"]
            assert value == sum(tokens_of(r, source) for r in given_reports)
    reusing = [report for report in given_reports if report.decision == "reuse"]
    assert found["kvshare:donors_count",] == len(reusing)
    assert found["kvshare:donors_sum",] == sum(report.donors for report in reusing)
    assert plain.totals == metrics.totals
    assert not plain.failed
    assert not metrics.failed


def test_times_tokens_and_faults(registry):
    metrics = Metrics(Exporter(LABELS, registry))
    metrics.planned(2.0)
    metrics.planned(0.2)
    metrics.placed(300, 20.0)
    for step in (*STEPS, "copy"):
        metrics.fault(step)
    found = exported(registry)
    assert found["kvshare:plan_seconds_count",] == 2
    assert found["kvshare:plan_seconds_sum",] == pytest.approx(0.0022)
    assert found["kvshare:plan_seconds_bucket", ("le", "0.001")] == 1
    assert found["kvshare:copy_seconds_sum",] == pytest.approx(0.02)
    assert found["kvshare:copied_tokens_total",] == 300
    for step in STEPS:
        assert found["kvshare:faults_total", ("step", step)] == 1 + (step == "copy")


def test_a_reason_or_a_step_that_nobody_listed_is_counted_all_the_same(registry):
    metrics = Metrics(Exporter(LABELS, registry))
    metrics.prefill(ReuseReport(reason="new_here", new_tokens=5))
    metrics.fault("elsewhere")
    found = exported(registry)
    key = ("decision", "none"), ("reason", "new_here")
    assert found["kvshare:requests_total", *key] == 1
    assert found["kvshare:faults_total", ("step", "elsewhere")] == 1


class Broken:
    def child(self, *_):
        raise OSError("no space left on device")


def test_what_goes_wrong_in_counting_stays_there_and_is_logged_once(caplog):
    clock = Clock()
    metrics = Metrics(Broken(), clock=clock)
    metrics.watch(lambda: 1 / 0)
    for _ in range(3):
        metrics.prefill(ReuseReport(new_tokens=3))
        metrics.prefill(None)
        metrics.prefill(ReuseReport(), None)
        metrics.fault("copy")
        metrics.planned("long")
        metrics.placed(None, None)
        metrics.tick()
        clock.now += 70
    assert metrics.failed
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_gauges_follow_the_index_at_most_once_a_second(registry):
    clock, asked = Clock(), []
    metrics = Metrics(Exporter(LABELS, registry), clock=clock)

    def size():
        asked.append(clock.now)
        return SIZE

    metrics.watch(size)
    for _ in range(50):
        metrics.tick()
        clock.now += 0.1
    assert len(asked) == 5
    found = exported(registry)
    assert found["kvshare:index_tokens",] == 1200
    assert found["kvshare:index_namespaces",] == 2
    assert found["kvshare:index_entries",] == 1300
    assert found["kvshare:index_bytes",] == 2_400_000
    assert found["kvshare:donor_locks",] == 3
    assert found["kvshare:index_failed",] == 0


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


@pytest.fixture
def at_info(caplog):
    caplog.set_level(logging.INFO, logger=module.__name__)
    return caplog


def test_a_line_a_minute_while_there_is_traffic(at_info):
    clock = Clock()
    metrics = Metrics(clock=clock)
    metrics.watch(lambda: SIZE)

    def run(seconds, requests_each_second):
        for _ in range(seconds):
            for _ in range(requests_each_second):
                metrics.prefill(
                    ReuseReport(
                        prefix_tokens=10, reused_tokens=600, new_tokens=5, decision="reuse",
                        reason="ok", donors=1,
                    )
                )  # fmt: skip
                metrics.prefill(ReuseReport(new_tokens=100, reason="no_match"))
            clock.now += 1
            metrics.tick()

    run(59, 1)
    assert lines(at_info) == []
    metrics.fault("copy")
    run(1, 1)
    assert lines(at_info) == [
        "KVShare, last 60 s: 120 requests, 60 with reuse (50 %); prompt tokens: 600 prefix, "
        "0 approximate prefix, 36,000 reused, 0 recomputed, 6,300 new; faults: 1 copy; "
        "index: 1,200 tokens, 2 namespaces, 2.4 MB"
    ]
    run(600, 0)
    assert len(lines(at_info)) == 1
    run(60, 2)
    assert len(lines(at_info)) == 2
    assert "240 requests" in lines(at_info)[1]
    assert "faults: none" in lines(at_info)[1]


def test_a_clock_that_goes_back_loses_no_count_and_does_not_silence_the_line(at_info, registry):
    clock = Clock()
    metrics = Metrics(Exporter(LABELS, registry), clock=clock)
    metrics.watch(lambda: SIZE)
    metrics.tick()
    metrics.prefill(ReuseReport(new_tokens=7, reason="no_match"))
    clock.now -= 900
    for _ in range(60):
        metrics.tick()
        clock.now += 1
    assert lines(at_info) == []
    metrics.tick()
    assert len(lines(at_info)) == 1
    assert "1 requests" in lines(at_info)[0]
    assert exported(registry)["kvshare:index_tokens",] == 1200


def test_one_rank_writes_the_line(at_info):
    clock = Clock()
    metrics = Metrics(clock=clock, log_lines=False)
    metrics.prefill(ReuseReport(new_tokens=7, reason="no_match"))
    clock.now += 61
    metrics.tick()
    assert lines(at_info) == []


def test_a_given_up_index_is_named_in_the_line(at_info):
    clock = Clock()
    metrics = Metrics(clock=clock)
    metrics.watch(lambda: IndexSize(0, 0, 0, 0, 0, failed=True))
    metrics.fault("index")
    clock.now += 60
    metrics.tick()
    assert "faults: 1 index; index given up until the next flush" in lines(at_info)[0]
