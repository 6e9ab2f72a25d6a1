"""The whole command on stub servers: what it writes, how it resumes, and what it refuses."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from serving_stub import Stub
from typer.testing import CliRunner, Result

from kvshare_eval.errors import EvalError
from kvshare_eval.run_dir import Run, load_run
from kvshare_eval.serving import cli, sides, sweep
from kvshare_eval.serving.cli import serving
from kvshare_eval.serving.record import RequestRecord, WindowRecord
from kvshare_eval.serving.sides import Side

pytestmark = pytest.mark.unit

app = typer.Typer()
app.command()(serving)

RAG = "rag:prompt_tokens=64,passage_tokens=16,output_tokens=2"
SMALL = ["--workload", RAG, "--repeats", "2", "--requests", "3", "--closed-requests", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that knows the words of the repository's passages."""
    tokenizers = pytest.importorskip("tokenizers")
    from kvshare_eval.passages import load_passages

    splitter = tokenizers.pre_tokenizers.Whitespace()
    text = " ".join(passage.text for passage in load_passages())
    words = dict.fromkeys(word for word, _ in splitter.pre_tokenize_str(text))
    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
    made.pre_tokenizer = splitter
    folder = tmp_path_factory.mktemp("secret") / "tiny"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def two_servers(**faults: Any) -> Iterator[tuple[Stub, Stub]]:
    with Stub(**faults) as stock, Stub(kvshare=True) as kvshare:
        yield stock, kvshare


def urls(stock: Stub, kvshare: Stub) -> list[str]:
    found = [f"stock={stock.url}", f"off={kvshare.url}", f"reuse={kvshare.url}"]
    return [word for one in found for word in ("--url", one)]


def call(model: Path, out: Path, *words: str) -> Result:
    given = ["--model", str(model), "--out", str(out), "--client", "own", *words]
    return CliRunner().invoke(app, given, env={"COLUMNS": "200"})


def done(result: Result) -> str:
    if result.exception is not None:
        raise result.exception
    return result.output


def of(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records if record["type"] == kind]


def test_one_command(model: Path, tmp_path: Path) -> None:
    with two_servers(delay_s=0.005) as (stock, kvshare):
        words = [*SMALL, "--rate-multiples", "0.5,2"]
        out = done(call(model, tmp_path / "run", *words, *urls(stock, kvshare)))
    run = load_run(tmp_path / "run")
    assert run.kind == "serving"
    windows = [WindowRecord(**_typed(one)) for one in of(run, "window")]
    # Closed and two multiples of what stock serves alone, three sides, two repeats.
    assert len(windows) == 3 * 3 * 2
    (calibration,) = of(run, "calibration")
    assert calibration["side"] == "stock"
    assert {window.rate for window in windows} == {
        None,
        *(float(f"{calibration['service_rate'] * x:.3g}") for x in (0.5, 2)),
    }
    (slo,) = of(run, "slo")
    assert slo["ttft_ms"] == pytest.approx(3 * calibration["ttft_ms"])
    assert slo["tbt_ms"] == pytest.approx(3 * calibration["tbt_ms"])
    assert slo["workload"] == RAG_TEXT
    requests = [RequestRecord(**_typed(one)) for one in of(run, "request")]
    counts = Counter(request.window for request in requests)
    assert all(counts[one.key] == (2 if one.rate is None else 3) for one in windows)
    assert {request.error for request in requests} == {None}
    by_side = {one.key: one.side for one in windows}
    reused = {
        side: sum(
            r.report.get("reused_tokens", 0) for r in requests if by_side.get(r.window) == side
        )
        for side in ("stock", "off", "reuse")
    }
    assert reused["stock"] == reused["off"] == 0 < reused["reuse"]
    first = windows[0]
    assert (first.workload, first.prompt_tokens) == (RAG_TEXT, 64)
    assert first.reusable_share == pytest.approx(51 / 64)
    assert first.seconds > 0
    assert first.scheduler_cpu_s is None  # unknown behind a URL
    assert first.kv_tokens_peak == 1234
    assert first.kv_bytes_peak == 1234 * 2 * 2 * 4 * 8 * 4
    assert f"{first.key}: " in out
    assert {one["side"]: one["kv_bytes_per_token"] for one in of(run, "server")} == {
        "stock": 512,
        "off": 512,
        "reuse": 512,
    }
    # Sent away: no path, no host.
    text = "".join(file.read_text() for file in (tmp_path / "run").iterdir())
    for secret in ("secret", "127.0.0.1", str(tmp_path)):
        assert secret not in text


RAG_TEXT = "rag:output_tokens=2,passage_tokens=16,prompt_tokens=64"


def _typed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "type"}


def test_all_sides_get_the_same_prompts_into_an_empty_cache(model: Path, tmp_path: Path) -> None:
    words = [*SMALL, "--rates", "closed,50", "--slo-ttft-ms", "none", "--slo-tbt-ms", "7"]
    with two_servers() as (stock, kvshare):
        done(call(model, tmp_path / "run", *words, *urls(stock, kvshare)))
    run = load_run(tmp_path / "run")
    order = [(one["repeat"], one["rate"], one["side"]) for one in of(run, "window")]
    assert order == [
        *((0, None, side) for side in ("stock", "off", "reuse")),
        *((0, 50.0, side) for side in ("stock", "off", "reuse")),
        *((1, None, side) for side in ("off", "reuse", "stock")),
        *((1, 50.0, side) for side in ("off", "reuse", "stock")),
    ]
    assert [(one["ttft_ms"], one["tbt_ms"]) for one in of(run, "slo")] == [(None, 7.0)]
    assert of(run, "calibration") == []

    def prompts(stub: Stub, want: object) -> list[list[int]]:
        return [
            body["input_ids"]
            for body in stub.bodies
            if body.get("stream")
            and body["sampling_params"].get("custom_params", {}).get("kvshare") == want
        ]

    assert prompts(stock, None) == prompts(kvshare, None)
    assert prompts(stock, None) == prompts(kvshare, {"reuse": "exact_prefix"})
    # Each window: a flush, two warm-up prompts, then two or three requests.
    after_probes = " ".join(stock.events[2:])
    windows = ["flush" + " generate" * (2 + count) for count in (2, 3, 2, 3)]
    assert after_probes == " ".join(windows)


def test_it_resumes_after_an_interruption(model: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a window, then resumed: the same records as without a stop."""
    words = [*SMALL, "--rates", "auto", "--rate-multiples", "2"]
    with two_servers() as (stock, kvshare):
        # Several requests come at once, each in a thread of the stub.
        seen = itertools.count(1)

        def interrupt(body: dict[str, Any]) -> str | None:
            if next(seen) == 22:
                os.kill(os.getpid(), 2)
            return None

        kvshare.fault = interrupt
        stopped = call(model, tmp_path / "run", *words, *urls(stock, kvshare))
        assert stopped.exit_code != 0
        before = load_run(tmp_path / "run")
        assert 0 < len(of(before, "window")) < 12
        # As if it had been stopped while it wrote a window: requests without their window, and
        # half a line.
        ended = before.records[-1]["key"]
        with (tmp_path / "run" / "records.jsonl").open("a") as file:
            torn = {"type": "request", "key": "torn/0", "window": "torn"}
            file.write(json.dumps(torn) + "\n" + '{"type": "wind')
        refused = call(model, tmp_path / "run", *words, *urls(stock, kvshare))
        assert "--resume goes on with it" in str(refused.exception)
        other = call(
            model, tmp_path / "run", "--seed", "2", "--resume", *words, *urls(stock, kvshare)
        )
        assert "seed" in str(other.exception)
        sent = len(stock.bodies)
        done(call(model, tmp_path / "run", "--resume", *words, *urls(stock, kvshare)))
        after = load_run(tmp_path / "run")
        assert len(of(after, "window")) == 12
        assert len(of(after, "calibration")) == 1
        assert of(after, "calibration") == of(before, "calibration")
        assert of(after, "window")[: len(of(before, "window"))] == of(before, "window")
        keys = [one["key"] for one in after.records]
        assert len(set(keys)) == len(keys)
        assert ended in keys
        missing = [one for one in of(after, "window") if one not in of(before, "window")]
        expected = sum(
            2 + (2 if one["rate"] is None else 3) for one in missing if one["side"] == "stock"
        )
        assert len(stock.bodies) - sent == 2 + expected
        again = len(stock.bodies)
        done(call(model, tmp_path / "run", "--resume", *words, *urls(stock, kvshare)))
        assert len(stock.bodies) == again + 2  # the two probes; nothing is left to measure


def test_sweeps_and_several_workloads(model: Path, tmp_path: Path) -> None:
    words = ["--workload", RAG, "--workload", "no_reuse:prompt_tokens=32", "--shares", "0,0.5"]
    words += ["--rates", "100", "--repeats", "1", "--window-seconds", "0.1"]
    words += ["--slo-ttft-ms", "5", "--slo-tbt-ms", "5", "--no-poll"]
    with two_servers() as (stock, kvshare):
        done(call(model, tmp_path / "run", *words, *urls(stock, kvshare)))
    windows = of(load_run(tmp_path / "run"), "window")
    assert len(windows) == 3 * 3
    shares = {one["workload"]: one["reusable_share"] for one in windows}
    assert list(shares.values()) == [0.0, 0.5, 0.0]
    assert {one["kv_tokens_peak"] for one in windows} == {None}


def test_a_trace(model: Path, tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:17:03.{i}000000,{9 + i},3\n" for i in range(9))
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "azure_llm_2023_conv.csv").write_text(head + rows)
    words = ["--workload", "trace:speed=2", "--data", str(tmp_path), "--window-seconds", "0.25"]
    words += ["--repeats", "1", "--closed-requests", "2"]
    with Stub() as stock:
        done(call(model, tmp_path / "run", *words, "--url", f"stock={stock.url}"))
    run = load_run(tmp_path / "run")
    (window,) = of(run, "window")
    assert window["key"] == "trace:speed=2.0/stock/trace/0"
    assert window["rate"] == pytest.approx(5 / 0.2)
    mine = [one for one in of(run, "request") if one["window"] == window["key"]]
    assert [one["due_ms"] for one in mine] == pytest.approx([0, 50, 100, 150, 200])
    assert [one["prompt_tokens"] for one in mine] == [9, 10, 11, 12, 13]


def test_some_errors_are_records_and_nothing_but_errors_ends_the_run(
    model: Path, tmp_path: Path
) -> None:
    words = [*SMALL, "--rates", "100", "--repeats", "1", "--slo-ttft-ms", "9"]
    words += ["--slo-tbt-ms", "none"]

    def third(body: dict[str, Any]) -> str | None:
        return "error" if len(stock.bodies) == 6 else None

    def measured(body: dict[str, Any]) -> str | None:
        return "refuse" if body["sampling_params"]["max_new_tokens"] > 1 else None

    with Stub() as stock:
        stock.fault = third
        out = done(call(model, tmp_path / "some", *words, "--url", f"stock={stock.url}"))
        assert "1 failed" in out
        stock.fault = measured
        result = call(model, tmp_path / "all", *words, "--url", f"stock={stock.url}")
        assert "every request failed: HTTP 400: reuse" in str(result.exception)
    run = load_run(tmp_path / "some")
    assert [one["error"] is None for one in of(run, "request")].count(False) == 1
    assert of(load_run(tmp_path / "all"), "window") == []


def test_sglangs_client_where_it_can(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvshare_eval.serving import window as window_module
    from kvshare_eval.serving.load import Measured, Sender, closed_loop

    asked: list[float | None] = []

    async def fake(sender: Sender, requests: Any, rate: float | None, **more: Any) -> Measured:
        asked.append(rate)
        return await closed_loop(sender, requests)

    monkeypatch.setattr(window_module, "bench_serving", fake)
    reasons = {"rag": None, "trace": "it cannot"}
    monkeypatch.setattr(sweep, "why_not", lambda workload, model: reasons[workload.name])
    (tmp_path / "azure_llm_2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1000000,9,3\n"
    )
    words = [
        "--workload",
        RAG,
        "--workload",
        "trace",
        "--data",
        str(tmp_path),
        "--rates",
        "closed,9",
    ]
    words += ["--requests", "2", "--closed-requests", "2", "--repeats", "1"]
    with Stub() as stock:
        words += ["--url", f"stock={stock.url}"]
        done(call(model, tmp_path / "run", *words, "--client", "auto"))
        refused = call(model, tmp_path / "other", *words, "--client", "sglang")
    run = load_run(tmp_path / "run")
    assert asked == [None, 9.0]
    assert [one["client"] for one in of(run, "window")] == ["sglang", "sglang", "own"]
    assert run.settings["clients"] == {RAG_TEXT: "sglang", "trace": "own"}
    assert "--client sglang: it cannot; --client own can" in str(refused.exception)


def test_it_starts_the_servers_that_the_sides_need(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs: dict[str, Stub] = {}
    started: list[tuple[str, tuple[str, ...]]] = []

    class FakeServer:
        def __init__(self, model: str, *, mode: str, log: Path, args: list[str]) -> None:
            started.append((mode, tuple(args)))
            self.mode = mode

        def __enter__(self) -> "FakeServer":
            stubs[self.mode] = Stub(kvshare=self.mode == "kvshare").__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            stubs.pop(self.mode).__exit__(None, None, None)

        @property
        def url(self) -> str:
            return stubs[self.mode].url

        def schedulers(self) -> list[Any]:
            return []

    monkeypatch.setattr(sides, "MeteredServer", FakeServer)
    words = [*SMALL, "--rates", "50", "--sides", "off,reuse,stock", "--repeats", "1"]
    done(call(model, tmp_path / "run", *words, "--server-args", "--dtype float32 --sleep-on-idle"))
    flags = ("--log-level-http", "warning", "--enable-metrics", "--dtype", "float32")
    assert started == [(mode, (*flags, "--sleep-on-idle")) for mode in ("kvshare", "stock")]
    assert stubs == {}
    run = load_run(tmp_path / "run")
    assert [one["side"] for one in of(run, "window")] == ["off", "reuse", "stock"]
    assert run.settings["servers"] == list(started[0][1])


def test_the_wrong_kind_of_server(model: Path, tmp_path: Path) -> None:
    with two_servers() as (stock, kvshare):
        for number, (url, message) in enumerate(
            [
                (f"reuse={stock.url}", "its server does not run KVShare; allowed is stock"),
                (f"stock={kvshare.url}", "its server runs KVShare; allowed are off, reuse"),
                ("stock=http://127.0.0.1:9", "no answer"),
            ]
        ):
            words = [*SMALL, "--rates", "1", "--slo-ttft-ms", "none", "--slo-tbt-ms", "none"]
            result = call(model, tmp_path / str(number), *words, "--url", url)
            assert isinstance(result.exception, EvalError)
            assert message in str(result.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sides", "stock,none"], "unknown side 'none'"),
        (["--sides", "reuse"], "rest on the side stock or off"),
        (["--sides", "reuse", "--rates", "1"], "rest on the side stock or off"),
        (["--rates", "fast"], "'fast' is no rate"),
        (["--rate-multiples", "0"], "--rate-multiples 0: must be above 0"),
        (["--shares", "a"], "--shares a: write numbers"),
        (["--slo-ttft-ms", "-1"], "--slo-ttft-ms -1: must be above 0"),
        (["--requests", "1", "--window-seconds", "1"], "give one of them"),
        (["--client", "curl"], "allowed are auto, own, sglang"),
        (["--url", "stock=http://h:1", "--server-args", "x"], "not for --url"),
        (["--workload", "rag:share=2"], "share=2"),
        (["--model", "/no/such/model"], "no tokenizer.json that can be read"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    model: Path, tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(cli, "started_sides", never)
    result = call(model, tmp_path / "run", *words)
    assert isinstance(result.exception, EvalError)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_refused_flush_is_said() -> None:
    with Stub() as stub:
        side = Side("stock", stub.url + "/nowhere", None)
        with pytest.raises(EvalError, match="answered 404"):
            side.flush()
