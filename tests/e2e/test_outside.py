"""What operators and client programs see: metrics, verify, the examples, an evaluation."""

from __future__ import annotations

import json
import re
import time

import pytest
import requests
from programs import ROOT, example, run
from prometheus_client.parser import text_string_to_metric_families

from kvshare_eval.passages import build_prompt, load_passages
from kvshare_eval.servers import Server
from sglang_kvshare.engine.metrics import REQUESTS, SERIES, SOURCES, TOKENS

pytestmark = [pytest.mark.e2e]
METRIC = re.compile(r"\b(?:kvshare|sglang):\w+")


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """With metrics; and without the gate, so that a busy machine changes no decision."""
    log = tmp_path_factory.mktemp("outside") / "server.log"
    flags = ("--enable-metrics", "--kvshare-gate", "off")
    with Server(model_folder, args=flags, log=log) as running:
        yield running


def scrape(server) -> list:
    text = requests.get(server.url + "/metrics", timeout=30).text
    return [sample for f in text_string_to_metric_families(text) for sample in f.samples]


def values(server, series) -> dict[tuple[str, ...], float]:
    """Label values of ``series``, in its own order -> value."""
    return {
        tuple(sample.labels[name] for name in series.labels): sample.value
        for sample in scrape(server)
        if sample.name == series.name
    }


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_every_series_is_there_from_the_start_with_the_labels_of_sglang(server):
    samples = scrape(server)
    theirs = next(s.labels for s in samples if s.name == "sglang:num_running_reqs")
    for series in SERIES:
        end = "_count" if series.kind == "histogram" else ""
        mine = [s for s in samples if s.name == series.name + end]
        assert {tuple(s.labels[name] for name in series.labels) for s in mine} == set(series.values)
        for sample in mine:
            shared = {k: v for k, v in sample.labels.items() if k not in series.labels}
            assert shared == theirs, series.name


def test_counters_equal_the_sum_of_the_reports_and_gauges_follow_the_cache(server, tokenizer):
    passages = load_passages()
    index_tokens = next(series for series in SERIES if series.name == "kvshare:index_tokens")

    def encode(numbers, question):
        text = build_prompt([passages[number] for number in numbers], question)
        return tokenizer(text)["input_ids"]

    requests_before, tokens_before = values(server, REQUESTS), values(server, TOKENS)
    reports = [
        server.generate(encode(numbers, question), max_new_tokens=2, kvshare=settings).report
        for numbers, question, settings in (
            ((0, 1), "Who?", None),
            ((1, 0), "Who?", None),
            ((1, 0), "Who?", {"reuse": "off"}),
            ((2, 1), "When?", {"recompute_ratio": 1}),
            ((0, 2), "When?", {"reuse": "exact_prefix"}),
        )
    ]
    assert [report["reason"] for report in reports] == [
        *("no_match", "ok", "off", "ok", "exact_prefix")
    ]
    for key, total in values(server, REQUESTS).items():
        expected = sum((report["decision"], report["reason"]) == key for report in reports)
        assert total - requests_before[key] == expected, key
    tokens = {key: total - tokens_before[key] for key, total in values(server, TOKENS).items()}
    # A report counts an approximate prefix as reused.
    tokens["reused",] += tokens.pop(("approximate_prefix",))
    assert tokens == {
        (source,): sum(report[f"{source}_tokens"] for report in reports)
        for source in SOURCES
        if source != "approximate_prefix"
    }
    # The gauges are set by the idle scheduler as well.
    eventually(lambda: values(server, index_tokens)[()] > 500)
    server.flush_cache()
    eventually(lambda: values(server, index_tokens)[()] == 0)


def test_a_live_server_exports_what_the_dashboard_asks_for(server):
    dashboard = (ROOT / "examples" / "monitoring" / "dashboard.json").read_text()
    live = {sample.name for sample in scrape(server)}
    assert set(METRIC.findall(dashboard)) <= live


def test_verify_proves_a_reuse_on_it(server):
    out = run("-c", "from sglang_kvshare.cli import main; main()", "verify", server.url, "--json")
    found = json.loads(out)
    assert found["ok"], found
    assert found["prompts_made_of"] == "text"
    assert found["tolerance"] == 1e-3
    assert found["requests"]["default"]["report"]["reused_tokens"] > 400
    assert 0 < found["default_ratio_against_off"]["max_logprob"] < 5


def test_the_openai_example_reuses_documents_in_another_order(server):
    server.flush_cache()
    first, second, off = example("openai_client.py", "--url", server.url)
    assert first["reason"] == "no_match"
    assert second["reused"] > 150
    assert off["prefix"] == off["reused"] == 0
    assert sum(second[k] for k in ("prefix", "reused", "recomputed", "new")) == off["new"]


def test_the_fork_example_shares_a_prefix_and_reuses_behind_another(server):
    server.flush_cache()
    reports = example("dsl_fork.py", "--url", server.url)
    assert len(reports) == 6
    # The branches of a fork take the document as a prefix, or find it where it was reused.
    assert all(report["prefix"] > 150 for report in reports[:3])
    assert all(report["prefix"] + report["reused"] > 150 for report in reports[3:])
    assert any(report["reused"] > 150 for report in reports[3:])


def evaluate(*words, code=0):
    from typer.testing import CliRunner

    from kvshare_eval.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_a_small_evaluation_of_quality_and_its_report(server, model_folder, tmp_path):
    from kvshare_eval.quality.record import from_dict
    from kvshare_eval.run_dir import load_run

    run = tmp_path / "quality"
    words = ["quality", "--url", server.url, "--tokenizer", model_folder, "--out", run]
    words += ["--task", "squad:passages=2,questions=1", "--task", "needle:words=150", "--cases", 2]
    for method in ("exact_prefix", "none", "seams@0.5", "no_context"):
        words += ["--method", method]
    evaluate(*words)
    records = [from_dict(each) for each in load_run(run).records if "method" in each]
    assert len(records) == 2 * 2 * 5
    for record in records:
        assert record.answer is not None
        assert record.scores[record.metric] >= 0
        if record.method == "exact_prefix":
            # The floor of what can be told apart: the same computation, in another batch.
            assert record.divergence.mean_kl < 1e-4
            assert record.same_as_full
        if record.method in ("none", "seams@0.5"):
            assert record.report["reused_tokens"] > 50
    kl = {
        name: sum(r.divergence.mean_kl for r in records if r.method == name)
        for name in ("exact_prefix", "none", "seams@0.5")
    }
    # Positive control: reuse without repair can be told from full recompute.
    assert kl["none"] > 10 * max(kl["exact_prefix"], 1e-6)
    # Nothing is left to do, and nothing is asked again.
    before = (run / "records.jsonl").read_bytes()
    evaluate(*words, "--resume")
    assert (run / "records.jsonl").read_bytes() == before
    page = tmp_path / "page.md"
    evaluate("report", run, "--out", page)
    assert all(f"`{record.method}`" in page.read_text() for record in records)
    assert "No regression" in evaluate("compare", run, run)


def test_a_small_evaluation_of_serving_and_its_report(server, model_folder, tmp_path):
    from kvshare_eval.run_dir import load_run

    run = tmp_path / "serving"
    words = ["serving", "--model", model_folder, "--out", run, "--client", "own"]
    words += ["--url", f"off={server.url}", "--url", f"reuse={server.url}"]
    words += ["--workload", "rag:prompt_tokens=400,share=0.75", "--rates", "closed,4"]
    words += ["--repeats", 1, "--requests", 4, "--closed-requests", 2]
    evaluate(*words, "--slo-ttft-ms", 60_000, "--slo-tbt-ms", "none")
    records = load_run(run).records
    windows = [each for each in records if each.get("type") == "window"]
    assert {each["side"] for each in windows} == {"off", "reuse"}
    asked = [each for each in records if each.get("type") == "request"]
    assert not [each["error"] for each in asked if each["error"]]
    reused = {
        side: sum(r["report"]["reused_tokens"] for r in asked if f"/{side}/" in r["window"])
        for side in ("off", "reuse")
    }
    assert reused["off"] == 0 < reused["reuse"]
    page = tmp_path / "page.md"
    evaluate("report", run, "--out", page)
    assert "TTFT" in page.read_text()
