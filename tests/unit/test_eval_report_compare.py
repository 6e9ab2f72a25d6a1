"""Comparisons of two runs: a change that is there is found, noise is not called one."""

from __future__ import annotations

import json
import statistics

import pytest
from synthetic_runs import quality_run, serving_run
from typer.testing import CliRunner

from kvshare_eval.cli import app
from kvshare_eval.errors import EvalError
from kvshare_eval.report import compare
from kvshare_eval.report.comparison_text import render
from kvshare_eval.run_dir import load_run

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def quality(root):
    return quality_run(root / "q")


@pytest.fixture(scope="module")
def worse(root):
    """Half as good a repair: answers and divergence."""
    return quality_run(root / "worse", kl_scale={"seams@0.1": 0.9}, right={"seams@0.1": 0.4})


@pytest.fixture(scope="module")
def serving(root):
    return serving_run(root / "s")


def change(found, where, figure):
    return next(c for c in found.changes if (c.where, c.figure) == (where, figure))


def test_a_run_against_itself_has_no_regression(quality, serving):
    for run in (quality, serving):
        found = compare(run, run)
        assert {one.outcome for one in found.changes} == {"within noise"}
        assert not found.has_regression
        assert not found.warnings


def test_a_regression_of_quality_is_found_and_paired(quality, worse):
    found = compare(quality, worse)
    assert found.has_regression
    scores = [
        [
            r["scores"]["f1"]
            for r in load_run(run).records
            if (r["task"], r["method"]) == ("gsm8k", "seams@0.1")
        ]
        for run in (quality, worse)
    ]
    one = change(found, "gsm8k, seams@0.1", "f1")
    assert (one.before, one.after) == pytest.approx(tuple(map(statistics.mean, scores)))
    assert one.change.value == pytest.approx(one.after - one.before)
    assert one.size == pytest.approx(one.after / one.before - 1)
    kl = change(found, "gsm8k, seams@0.1", "KL")
    assert kl.change.value == pytest.approx(1.8, rel=0.01)
    # Other methods are the same, case by case, and pairing shows it.
    assert {c.where for c in found.changes if c.regression} == {
        "gsm8k, seams@0.1",
        "squad:passages=4, seams@0.1",
    }
    back = compare(worse, quality)
    assert not back.has_regression
    assert change(back, "gsm8k, seams@0.1", "KL").outcome == "better"


def test_a_change_below_the_threshold_is_no_regression(quality, root):
    slightly = quality_run(root / "slightly", kl_scale={"seams@0.1": 0.53})
    found = compare(quality, slightly, 0.05)
    one = change(found, "gsm8k, seams@0.1", "KL")
    assert one.outcome == "worse"
    assert one.size == pytest.approx(0.06, abs=0.005)
    assert one.regression
    assert not compare(quality, slightly, 0.10).has_regression
    with pytest.raises(EvalError, match="threshold=-1"):
        compare(quality, slightly, -1)


def test_independent_noise_is_no_change(root):
    runs = [quality_run(root / f"seed{seed}", seed=seed, groups=20) for seed in (1, 2)]
    found = compare(*runs)
    called = [one for one in found.changes if one.outcome in ("better", "worse")]
    assert len(called) <= 0.15 * len(found.changes)
    assert any("seed differs" in warning for warning in found.warnings)


def test_a_regression_of_speed_is_found_by_repeat(serving, root):
    slower = serving_run(root / "slower", factors={"reuse": 0.5})
    found = compare(serving, slower)
    one = change(found, "rag:share=0.8, 2/s, reuse", "TTFT p50")
    assert one.change.value == pytest.approx(1.25, rel=1e-6)
    assert one.regression
    assert one.how == "3 repeats, paired"
    assert change(found, "rag:share=0.8, 2/s, stock", "TTFT p50").outcome == "within noise"
    assert not compare(slower, serving).has_regression


def test_too_few_repeats_are_compared_unpaired(root):
    a = serving_run(root / "a1", repeats=1)
    b = serving_run(root / "b1", repeats=1, factors={"reuse": 0.8})
    found = compare(a, b)
    one = change(found, "rag:share=0.8, 2/s, reuse", "TTFT p50")
    assert one.how.endswith("blocks of requests, not paired")
    assert one.change.value == pytest.approx(2.0, rel=1e-6)
    assert one.change.low < 2 < one.change.high
    assert one.regression
    # Throughput has one figure a window, and one repeat tells nothing about it.
    assert change(found, "rag:share=0.8, 2/s, reuse", "throughput").outcome == "no interval"
    other = serving_run(root / "c1", repeats=1, seed=9)
    stock = change(compare(a, other), "rag:share=0.8, 1/s, stock", "TTFT p50")
    assert stock.change.low < stock.change.value < stock.change.high


def test_only_what_is_common_is_compared(quality, root):
    part = quality_run(root / "part", tasks=("gsm8k", "other"), methods=("full", "none"))
    found = compare(quality, part)
    assert {one.where for one in found.changes} == {"gsm8k, full", "gsm8k, none"}


def test_what_cannot_be_compared_is_an_error(quality, serving, root):
    with pytest.raises(EvalError, match="q is a quality run and s a serving run"):
        compare(quality, serving)
    other = quality_run(root / "other", tasks=("elsewhere",))
    with pytest.raises(EvalError, match="no task, method and case in common"):
        compare(quality, other)
    slow = serving_run(root / "rates", rates=(9.0,))
    with pytest.raises(EvalError, match="no workload, rate and side in common"):
        compare(serving, slow)


def test_differences_of_set_up_are_told(quality, root):
    other = quality_run(
        root / "flags", settings={"model": "large", "server": {"dtype": "bfloat16"}}
    )
    facts = json.loads((other / "run.json").read_text(encoding="utf-8"))
    (other / "run.json").write_text(json.dumps({**facts, "machine": "arm64"}), encoding="utf-8")
    warnings = compare(quality, other).warnings
    assert [warning.split(" differs")[0] for warning in warnings] == ["machine", "model", "server"]
    assert "'tiny' and 'large'" in warnings[1]
    assert "Warning: model differs" in render(compare(quality, other))


def test_worst_first_in_words(quality, worse):
    text = render(compare(quality, worse))
    assert text.startswith("`q` (A) against `worse` (B): 4 worse,")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert all("**worse**" in row for row in rows[:4])
    assert not any("**worse**" in row for row in rows[4:])
    assert "No regression" in render(compare(quality, quality))


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_command():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_compare_ends_with_0_1_or_2(run_command, quality, worse, serving, root):
    assert run_command("compare", quality, quality).exit_code == 0
    found = run_command("compare", quality, worse)
    assert found.exit_code == 1
    assert "Regressions" in found.stdout
    assert run_command("compare", quality, worse, "--threshold", "5").exit_code == 0
    refused = run_command("compare", quality, serving)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("kvshare: q is a quality run")


def test_compare_writes_json(run_command, quality, worse):
    found = run_command("compare", quality, worse, "--json")
    assert found.exit_code == 1
    content = json.loads(found.stdout, parse_constant=lambda name: pytest.fail(name))
    assert content["has_regression"] is True
    assert {one["outcome"] for one in content["changes"]} == {"worse", "within noise"}
    assert content["changes"][0]["change"].keys() >= {"value", "low", "high", "cases", "groups"}


def test_report_writes_a_page(run_command, quality, root):
    done = run_command("report", quality, "--out", root / "out" / "page.md")
    assert done.exit_code == 0, done.output
    assert (root / "out" / "page.md").read_text(encoding="utf-8").startswith("# Evaluation")
    refused = run_command("report", root / "nothing")
    assert refused.exit_code == 2
    assert "holds no run" in refused.stderr
