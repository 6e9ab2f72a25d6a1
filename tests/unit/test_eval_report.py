"""The page against figures computed a plain way, and with everything missing that can be."""

from __future__ import annotations

import json
import math
import re
import statistics

import numpy as np
import pytest
from synthetic_runs import quality_record, quality_run, serving_run

from kvshare_eval.errors import EvalError
from kvshare_eval.report import text, write_report
from kvshare_eval.report.drawing import style
from kvshare_eval.report.findings import judge
from kvshare_eval.run_dir import RunDir, load_run
from kvshare_eval.stats.bootstrap import Interval
from kvshare_eval.stats.paired import KL_FLOOR

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quality and a serving run, and the page of both."""
    root = tmp_path_factory.mktemp("runs")
    quality_run(root / "q1")
    serving_run(root / "s1", workloads={"rag:share=0.5": (1.0, 2.0), "rag:share=0.8": (2.0,)})
    write_report([root / "q1", root / "s1"], root / "out" / "page.md")
    return root


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "out" / "page.md").read_text(encoding="utf-8")


def tables(page, section=""):
    """All tables behind the line ``section``, each a list of ``head -> cell``."""
    start = page.index(f"\n{section}\n") if section else 0
    for block in re.findall(r"(?:^\|.*\n)+", page[start:], re.M):
        lines = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        assert all(len(line) == len(lines[0]) for line in lines), lines[0]
        yield [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def find(page, section, column, **where):
    """The one row with these cells, of the first table behind ``section`` that has the column."""
    rows = next(rows for rows in tables(page, section) if rows and column in rows[0])
    found = [row for row in rows if all(row[key] == value for key, value in where.items())]
    assert len(found) == 1, (where, rows)
    return found[0]


def value(cell):
    return float(re.match(r"[-+]?[0-9.,]+(?:e[-+]\d+)?", cell)[0].replace(",", ""))


def bounds(cell):
    return tuple(map(float, re.search(r"\[(.*), (.*)\]", cell).groups()))


# --- quality --------------------------------------------------------------------------------------


def by_case(folder, task, method):
    return {
        (record["group"], record["case"]): record
        for record in load_run(folder / "q1").records
        if record["task"] == task and record["method"] == method
    }


def test_scores_of_a_task(folder, page):
    task = "squad:passages=4"
    full, none, seams, floor = (
        [record["scores"]["f1"] for record in by_case(folder, task, method).values()]
        for method in ("full", "none", "seams@0.1", "no_context")
    )
    row = find(page, f"### {task}", "PGR", method="`seams@0.1`")
    mean, top, low = map(statistics.mean, (seams, full, floor))
    assert value(row["f1"]) == pytest.approx(mean, abs=6e-4)
    assert bounds(row["f1"])[0] < mean < bounds(row["f1"])[1]
    assert value(row["minus full"]) == pytest.approx(mean - top, abs=6e-4)
    assert value(row["of full"]) == pytest.approx(mean / top, abs=6e-4)
    assert value(row["PGR"]) == pytest.approx((mean - low) / (top - low), abs=6e-4)
    ahead = [a - b for a, b in zip(seams, none, strict=True)]
    counts = [sum(map(test, ahead)) for test in ((0.0).__lt__, (0.0).__eq__, (0.0).__gt__)]
    assert row["better / equal / worse than none"].startswith(" / ".join(map(str, counts)))
    assert row["cases (groups)"] == "36 (12)"


def test_divergence_of_a_task(folder, page):
    task = "gsm8k"
    none, seams = (by_case(folder, task, method) for method in ("none", "seams@0.1"))
    pairs = [
        [statistics.mean(one[case]["divergence"]["kl"]) for one in (seams, none)] for case in none
    ]
    ratios = [max(a, KL_FLOOR) / max(b, KL_FLOOR) for a, b in pairs]
    row = find(page, f"### {task}", "KL / none", method="`seams@0.1`")
    assert value(row["KL / none"]) == pytest.approx(statistics.geometric_mean(ratios), rel=6e-3)
    assert value(row["KL median"]) == pytest.approx(
        statistics.median(a for a, _ in pairs), rel=6e-3
    )
    assert value(row["KL p90"]) == pytest.approx(np.quantile([a for a, _ in pairs], 0.9), rel=6e-3)
    assert value(row["KL mean"]) == pytest.approx(statistics.mean(a for a, _ in pairs), rel=6e-3)
    same = [statistics.mean(record["divergence"]["top1"]) for record in seams.values()]
    assert value(row["top-1 agreement"]) == pytest.approx(statistics.mean(same), abs=6e-4)
    assert row["first change"] == "never"
    never = statistics.mean(all(record["divergence"]["top1"]) for record in seams.values())
    assert value(row["never"]) == pytest.approx(100 * never, abs=0.06)
    assert row["computed"] == "20.0 % [all equal]"
    assert row["reused"] == "80.0 % [all equal]"
    full = find(page, f"### {task}", "KL / none", method="`full`")
    assert full["KL median"] == "0 by definition"


def test_all_tasks_have_the_same_weight(folder, page):
    logs, fractions = [], []
    for task in ("squad:passages=4", "gsm8k"):
        none, seams, full = (by_case(folder, task, m) for m in ("none", "seams@0.1", "full"))
        kls = [[statistics.mean(o[c]["divergence"]["kl"]) for o in (seams, none)] for c in none]
        logs.append(statistics.mean(math.log(max(a, 1e-4) / max(b, 1e-4)) for a, b in kls))
        sums = [sum(r["scores"]["f1"] for r in one.values()) for one in (seams, full)]
        fractions.append(sums[0] / sums[1])
    row = find(page, "### All tasks", "computed", method="`seams@0.1`")
    ratio = row["KL / none, geometric mean over tasks"]
    assert value(ratio) == pytest.approx(math.exp(statistics.mean(logs)), rel=6e-3)
    assert ratio.endswith(", 2 tasks")
    part = row["score, fraction of full, mean over tasks"]
    assert value(part) == pytest.approx(statistics.mean(fractions), abs=6e-4)


# --- serving --------------------------------------------------------------------------------------


def windows(folder, workload, side, rate):
    """TTFT of every completed request by repeat, and each repeat's seconds."""
    records = load_run(folder / "s1").records
    keys = {r["key"]: r for r in records if r["type"] == "window"}
    found = {}
    for record in records:
        if record["type"] == "request" and record["ttft_ms"] is not None:
            window = keys[record["window"]]
            if (window["workload"], window["side"], window["rate"]) == (workload, side, rate):
                times, _ = found.setdefault(window["repeat"], ([], window["seconds"]))
                times.append(record["ttft_ms"])
    return found


def test_latency_and_goodput_of_a_cell(folder, page):
    section, where = "### rag:share=0.5", {"rate": "2/s", "side": "`stock`"}
    repeats = windows(folder, "rag:share=0.5", "stock", 2.0)
    times = [time for one, _ in repeats.values() for time in one]
    row = find(page, section, "TTFT p95", **where)
    for name, q in (("TTFT p50", 0.5), ("TTFT p95", 0.95), ("TTFT p99", 0.99)):
        assert value(row[name]) == pytest.approx(np.quantile(times, q), rel=6e-3)
    assert row["requests (failed)"] == "120 (3)"
    work = find(page, section, "attained", **where)
    met = sum(time <= 250 for time in times)
    seconds = sum(seconds for _, seconds in repeats.values())
    assert value(work["attained"]) == pytest.approx(100 * met / 120, abs=0.06)
    assert value(work["goodput, requests/s"]) == pytest.approx(met / seconds, rel=6e-3)
    assert value(work["requests/s"]) == pytest.approx(len(times) / seconds, rel=6e-3)
    reuse = find(page, section, "attained", rate="2/s", side="`reuse`")
    shares = [reuse[kind] for kind in ("prefix", "reused", "recomputed", "new")]
    assert shares == ["10.0 %", "70.0 %", "0.0 %", "20.0 %"]
    assert [work[kind] for kind in ("prefix", "new")] == ["10.0 %", "90.0 %"]


def test_ratios_are_paired_by_repeat(folder, page):
    ours = windows(folder, "rag:share=0.8", "reuse", 2.0)
    theirs = windows(folder, "rag:share=0.8", "stock", 2.0)
    ratios = [np.median(ours[repeat][0]) / np.median(theirs[repeat][0]) for repeat in ours]
    row = find(page, "### rag:share=0.8", "sides", rate="2/s", sides="`reuse` / `stock`")
    assert row["repeats"] == "3"
    assert value(row["TTFT p50"]) == pytest.approx(statistics.geometric_mean(ratios), rel=6e-3)
    low, high = bounds(row["TTFT p50"])
    assert low < min(ratios)
    assert high > max(ratios)
    shares = find(
        page,
        "### TTFT by reusable share",
        "reusable share",
        **{"reusable share": "80.0 %", "side": "`reuse`", "rate": "2/s"},
    )
    assert shares["TTFT p50 / stock"] == row["TTFT p50"]


def test_saturation(page):
    section = "### Saturation"
    stock = find(page, section, "knee by SLO", workload="rag:share=0.5", side="`stock`")
    assert 1 < value(stock["knee by SLO"]) < 2
    reuse = find(page, section, "knee by SLO", workload="rag:share=0.5", side="`reuse`")
    assert reuse["knee by SLO"] == "at least 2.00/s"


# --- the page as a whole --------------------------------------------------------------------------


def test_every_table_and_figure_names_its_run(folder, page):
    commit = load_run(folder / "q1").facts["commit"]
    for kind in ("q1", "s1"):
        line = next(line for line in page.splitlines() if line.startswith(f"From run `{kind}`: "))
        for fact in (f"commit `{commit}`", "model tiny", "cores", "kvshare eval", "T"):
            assert fact in line
    # Behind every table, before the next heading or figure, stands where it is from.
    _, _, content = page.partition("\n## Quality: ")
    for part in re.split(r"^#{2,3} ", content, flags=re.M):
        assert "\n|" not in part or "From run `" in part[part.rindex("\n|") :]
    figures = re.findall(r"!\[(.*)\]\((.*)\)\n\n(.*)\n", page)
    assert len(figures) == 1 + 2 + 1 + 1
    for _, file, caption in figures:
        drawn = (folder / "out" / file).read_text(encoding="utf-8")
        assert "</svg>" in drawn
        assert f"commit `{commit}`" in caption
        assert f"From run `{file.split('/')[1][:2]}`" in caption
    names = {f"page-figures/{file.name}" for file in (folder / "out/page-figures").iterdir()}
    assert names == {file for _, file, _ in figures}


def test_figures_have_units_and_need_no_colour(folder):
    drawn = (folder / "out/page-figures/s1-saturation-rag-share-0-5.svg").read_text("utf-8")
    for label in ("TTFT p50, ms", "goodput, requests/s", "offered rate, requests/s", "reuse"):
        assert label in drawn
    drawn = (folder / "out/page-figures/q1-kl-1.svg").read_text("utf-8")
    assert "KL, nats (log scale)" in drawn
    looks = {(style(i)["marker"], str(style(i)["linestyle"])) for i in range(10)}
    assert len(looks) == 10


def test_the_page_is_the_same_each_time(folder, page, tmp_path):
    again = write_report([folder / "q1"], tmp_path / "page.md").read_text(encoding="utf-8")
    table = again[again.index("### All tasks") :]
    assert table in page
    drawn = tmp_path / "page-figures" / "q1-kl-1.svg"
    assert drawn.read_bytes() == (folder / "out/page-figures" / drawn.name).read_bytes()


def section_of(page, heading):
    _, _, after = page.partition(f"**{heading}**")
    return re.split(r"\n\*\*|\n## ", after)[0]


def test_the_page_says_what_loses_and_what_is_noise(page):
    loses, gains, noise = (section_of(page, h) for h in ("Loses", "Gains", "Within noise"))
    for name in ("squad:passages=4", "gsm8k"):
        assert re.search(rf"{name}, `none` \(run `q1`\): f1 minus `full` -0", loses)
        assert re.search(rf"{name}, `seams@0.1` \(run `q1`\): KL / `none` 0", gains)
        assert re.search(rf"{name}, `exact_prefix` \(run `q1`\): f1 minus `full` 0.000", noise)
    assert "`reuse` / `stock`" in gains
    assert "`reuse` / `stock` (run `s1`): TTFT" not in loses
    assert "TBT p50 1.00" in noise


@pytest.mark.parametrize(
    ("low", "high", "lower_is_better", "verdict"),
    [
        (1.1, 1.3, True, "loses"),
        (1.1, 1.3, False, "gains"),
        (0.7, 0.9, True, "gains"),
        (0.7, 0.9, False, "loses"),
        (0.9, 1.1, True, "noise"),
        (1.0, 1.1, True, "noise"),
        (None, None, True, "undecided"),
    ],
)
def test_judge(low, high, lower_is_better, verdict):
    found = Interval(1.0, low, high, 10, 5)
    assert judge(found, 1.0, lower_is_better=lower_is_better) == verdict


# --- what may be missing --------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Writes a page with figures that are drawn but not rendered, which takes most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
    return lambda paths: check_written(paths, tmp_path)


def check_written(paths, tmp_path):
    page = write_report(paths, tmp_path / "report").read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None)\b", page), page
    list(tables(page))
    return page


def test_empty_runs(written, tmp_path):
    for kind in ("quality", "serving"):
        with RunDir(tmp_path / kind, kind=kind, command="c", settings={}):
            pass
    page = written([tmp_path / "quality", tmp_path / "serving"])
    assert "The run holds no records yet." in page
    assert "The run holds no complete window yet." in page
    assert "There is nothing to compare" in page
    assert "model not named" in page


def test_no_gold(written, tmp_path):
    page = written([quality_run(tmp_path / "q", gold=False, groups=3)])
    assert "No answers with gold" in page
    assert "PGR |" not in page
    row = find(page, "### gsm8k", "KL / none", method="`seams@0.1`")
    assert value(row["KL / none"]) > 0


def test_too_few_groups(written, tmp_path):
    page = written([quality_run(tmp_path / "q", groups=5, tasks=("t",))])
    assert "Fewer than 6 groups: no intervals can be given." in page
    assert "[too few groups]" in page
    assert "Not to be told: the sample gives no interval" in page


@pytest.mark.parametrize(
    ("methods", "missing"),
    [(("full", "seams@0.1"), "none"), (("none", "other"), "full"), (("no_context",), "full")],
)
def test_missing_methods(written, tmp_path, methods, missing):
    page = written([quality_run(tmp_path / "q", methods=methods, groups=3)])
    assert f"`{missing}` was not run" in page


def test_all_scores_are_zero_and_nothing_changes(written, tmp_path):
    with RunDir(tmp_path / "q", kind="quality", command="c", settings={"model": "m|x"}) as run:
        for group in "abcdef":
            for method in ("full", "no_context", "none", "seams@0"):
                record = quality_record("t", group, "c", method, score=0.0, kl=0.0)
                run.append(record.to_dict())
    page = written([tmp_path / "q"])
    row = find(page, "### t", "PGR", method="`seams@0`")
    assert (row["of full"], row["PGR"]) == ("–", "–")
    assert row["better / equal / worse than none"] == "0 / 6 / 0, p=1.00"
    assert find(page, "### t", "KL / none", method="`seams@0`")["KL / none"] == "1.00 [all equal]"
    assert "m\\|x" in page


def test_a_case_that_one_method_lacks_is_left_out_of_comparisons(written, tmp_path):
    with RunDir(tmp_path / "q", kind="quality", command="c", settings={}) as run:
        for group, score in (("a", 1.0), ("b", 0.5), ("c", 0.0)):
            run.append(quality_record("t", group, "c", "full", score=1.0).to_dict())
            if group != "c":
                run.append(quality_record("t", group, "c", "none", score=score).to_dict())
    row = find(written([tmp_path / "q"]), "### t", "PGR", method="`none`")
    assert row["cases (groups)"] == "2 (2)"
    assert value(row["minus full"]) == -0.25
    assert value(row["of full"]) == 0.75


def test_serving_without_slo_reference_or_repeats(written, tmp_path):
    run = serving_run(
        tmp_path / "s", sides=("reuse",), slo=False, repeats=1, requests=8, rates=(None,)
    )
    page = written([run])
    assert "No SLO is set" in page
    assert "Neither `stock` nor `off` was measured" in page
    row = find(page, "### rag:share=0.8", "TTFT p95", side="`reuse`")
    assert (row["rate"], row["TTFT p95"]) == ("one at a time", "–")
    page = written([serving_run(tmp_path / "s2", repeats=1, requests=8, rates=(1.0,))])
    assert "[one repeat]" in page
    assert "Not to be told" in page


def test_limits_found_by_measuring_are_those_of_their_workload(written, tmp_path):
    """What the runner writes about servers and calibrations is no window and no request."""
    path = serving_run(tmp_path / "s", workloads=("rag:share=0.8", "no_reuse"), slo=False)
    limits = {"rag:share=0.8": 1.0, "no_reuse": 1e6}
    with (path / "records.jsonl").open("a", encoding="utf-8") as file:
        for record in (
            {"type": "server", "key": "server/stock", "side": "stock", "version": "0"},
            {"type": "calibration", "key": "calibration/no_reuse", "ttft_ms": 3.0},
            *(
                {"type": "slo", "key": f"slo/{w}", "workload": w, "ttft_ms": ms, "tbt_ms": None}
                for w, ms in limits.items()
            ),
        ):
            file.write(json.dumps(record) + "\n")
    page = written([path])
    for workload, low, high in (("rag:share=0.8", 0, 0), ("no_reuse", 90, 100)):
        row = find(page, f"### {workload}", "attained", rate="1/s", side="`stock`")
        # Some requests of the run failed.
        assert low <= float(row["attained"].split(" %")[0]) <= high


def test_serving_where_every_request_failed(written, tmp_path):
    page = written([serving_run(tmp_path / "s", requests=1)])
    row = find(page, "### rag:share=0.8", "attained", rate="1/s", side="`reuse`")
    assert row["attained"].startswith("0.0 %")
    assert row["goodput, requests/s"] == "0"
    assert row["reused"] == "–"


def test_what_cannot_be_reported_is_an_error(tmp_path):
    with pytest.raises(EvalError, match="at least one run"):
        write_report([], tmp_path / "page.md")
    with pytest.raises(EvalError, match="holds no run"):
        write_report([tmp_path / "nothing"], tmp_path / "page.md")
    for name in ("a/run", "b/run"):
        quality_run(tmp_path / name, groups=1, tasks=("t",))
    with pytest.raises(EvalError, match="two runs are called 'run'"):
        write_report([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "page.md")
    for kind, record in (("quality", {"key": "k"}), ("serving", {"key": "k", "type": "other"})):
        with RunDir(tmp_path / kind, kind=kind, command="c", settings={}) as run:
            run.append(record)
        with pytest.raises(EvalError, match="record 'k'"):
            write_report([tmp_path / kind], tmp_path / "page.md")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (0.63712, "0.637"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (0.00123, "0.00123"),
        (1.2e-5, "1.2e-05"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers_have_sensible_digits(number, expected):
    assert text.number(number) == expected


def test_intervals_in_words():
    assert text.interval(Interval(0.5, 0.4, 0.6, 9, 3)) == "0.500 [0.400, 0.600]"
    assert text.interval(Interval(0.5, 0.5, 0.5, 9, 3)) == "0.500 [all equal]"
    assert text.interval(Interval(0.5, None, None, 9, 1)) == "0.500 [too few groups]"
    assert text.interval(Interval(math.nan, None, None, 9, 3)) == "–"
    assert text.signed(-0.0001) == "0.000"
    assert text.fixed(-0.0001) == "0.000"
