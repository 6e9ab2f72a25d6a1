"""SGLang's own load client: its command line, its data set, and what its results become."""

import ast
import asyncio
import dataclasses
import importlib.util
import json
import os
import re
import sys
import textwrap
import time
import traceback
import types
import typing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving_stub import Stub

from kvshare_eval.errors import EvalError
from kvshare_eval.serving import sglang_client
from kvshare_eval.serving.load import Sender
from kvshare_eval.serving.sglang_client import (
    bench_serving,
    command,
    data_line,
    to_measured,
    why_not,
)
from kvshare_eval.serving.workloads import LoadRequest, workloads

pytestmark = pytest.mark.unit

REQUESTS = [LoadRequest((1, 2, 3, 4), 3, 0), LoadRequest((5, 6, 7, 8), 2, 0)]

#: A line in the shape that 0.5.23 writes with --output-details and --cache-report.
RESULT: dict[str, Any] = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "openai",
    "request_rate": 2.0,
    "duration": 1.75,
    "completed": 2,
    "median_ttft_ms": 250.0,
    "input_lens": [4, 4, 1],
    "output_lens": [3, 2, 0],
    "ttfts": [0.2, 0.3, 0.0],
    "itls": [[0.05, 0.04], [0.06], []],
    "generated_texts": ["abc", "ab", ""],
    "errors": ["", "", "Bad Request: reuse: unknown value"],
    "cached_tokens": [1, 0, 0],
    "cached_tokens_details": [{"kvshare": {"reused_tokens": 2}}, None, None],
}


def test_results_become_records() -> None:
    got = to_measured(RESULT, "w", 3)
    first, second, failed = got.records
    assert got.seconds == 1.75
    assert first.ttft_ms == 200.0
    assert first.tbt_ms == (50.0, 40.0)
    assert first.e2e_ms == pytest.approx(290.0)
    assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (4, 3, 1)
    assert first.report == {"reused_tokens": 2}
    assert first.error is None
    assert second.report == {}
    assert failed.error == "Bad Request: reuse: unknown value"
    assert failed.ttft_ms is None
    assert failed.e2e_ms is None
    assert [record.key for record in got.records] == ["w/0", "w/1", "w/2"]


def test_results_of_a_stock_server_and_of_nothing() -> None:
    stock = {key: value for key, value in RESULT.items() if not key.startswith("cached")}
    silent = {**stock, "errors": ["", "", ""]}
    got = to_measured(silent, "w", 3)
    assert got.records[0].cached_tokens == 0
    assert got.records[2].error == "no text came"
    with pytest.raises(EvalError, match="left 3 results of 4"):
        to_measured(RESULT, "w", 4)


def test_what_it_can_send(tmp_path: Path) -> None:
    known = workloads()
    assert "arrival times of workload trace" in str(why_not(known["trace"], "hub/name"))
    assert "chat template" in str(why_not(known["rag"], str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    installed = importlib.util.find_spec("sglang") is not None
    assert (why_not(known["rag"], str(tmp_path)) is None) == installed
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert (why_not(known["rag"], str(tmp_path)) is None) == installed


#: Reads what it was told to, and writes the results of it.
FAKE = """
    import json, os, sys
    assert "SGLANG_IS_IN_CI" not in os.environ
    words = dict(zip(sys.argv[1::1], sys.argv[2::1]))
    lines = [json.loads(line) for line in open(words["--dataset-path"])]
    if lines[0]["input_ids"] == [13]:
        sys.exit("no such luck")
    if lines[0]["input_ids"] == [14]:
        import time; time.sleep(60)
    count = int(words["--num-prompts"])
    result = {"duration": 2.0, "ttfts": [0.1] * count, "itls": [[0.5]] * count,
              "input_lens": [len(one["input_ids"]) for one in lines],
              "output_lens": [one["max_tokens"] for one in lines], "errors": [""] * count}
    open(words["--output-file"], "a").write(json.dumps(result) + "\\n")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(sglang_client, "PROGRAM", (sys.executable, str(program)))


def run(requests: list[LoadRequest], rate: float | None = 1.0) -> Any:
    sender = Sender("http://127.0.0.1:1", "w", None, 1.0)
    return asyncio.run(bench_serving(sender, requests, rate, name="n", model="m"))


@pytest.mark.usefixtures("fake")
def test_it_runs_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_IS_IN_CI", "1")
    got = run(REQUESTS)
    assert [(one.prompt_tokens, one.output_tokens) for one in got.records] == [(4, 3), (4, 2)]
    assert run(REQUESTS, None).seconds == 2.0
    with pytest.raises(EvalError, match="ended with code 1:\nno such luck"):
        run([LoadRequest((13,), 1, 0)])
    monkeypatch.setattr(sglang_client, "_START_SECONDS", -1.5)
    with pytest.raises(EvalError, match="did not end within"):
        run([LoadRequest((14,), 1, 0)])


# Against the installed SGLang: its source is read, not imported, which would take torch and
# half a minute.


def source(name: str) -> str:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    file = Path(next(iter(spec.submodule_search_locations))) / "benchmark" / name
    return file.read_text(encoding="utf-8")


def pieces(text: str, names: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """Some of a module's functions and classes, without its imports."""
    tree = ast.parse(text)
    kept = [node for node in tree.body if getattr(node, "name", None) in wanted]
    assert len(kept) == len(wanted)
    space = {**vars(typing), **names}
    exec(compile(ast.Module(kept, []), "sglang", "exec"), space)
    return space


@pytest.mark.parametrize("rate", [None, 0.5])
def test_its_options_are_those_of_the_installed_sglang(rate: float | None) -> None:
    known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source("serving.py")))
    used = {word for word in command("u", "m", 1, rate, "n", Path("/")) if word.startswith("--")}
    assert used >= {"--dataset-name", "--request-rate", "--output-details"}
    assert used <= known
    assert ("--max-concurrency" in used) == (rate is None)
    assert "--no-such-option" not in known


def test_the_installed_client_sends_what_ours_sends(tmp_path: Path) -> None:
    """SGLang's own data set and request function, from a line of ours to a server."""
    kvshare = {"reuse": "exact_prefix"}
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(data_line(one, kvshare)) + "\n" for one in REQUESTS))
    tokenizer = types.SimpleNamespace(apply_chat_template=lambda messages, **more: [1])
    row = {"DatasetRow": types.SimpleNamespace, "json": json, "PreTrainedTokenizerBase": Any}
    np = types.SimpleNamespace(sum=sum)
    read = pieces(source("datasets/openai_dataset.py"), {**row, "np": np}, "sample_openai_requests")
    rows = read["sample_openai_requests"](str(lines), 2, tokenizer)
    assert [one.output_len for one in rows] == [3, 2]

    args = types.SimpleNamespace(
        temperature=0.0, top_p=1.0, disable_ignore_eos=False, disable_stream=False,
        return_logprob=False, return_routed_experts=False, logprob_start_len=-1,
        top_logprobs_num=0, token_ids_logprob=None, cache_report=True, header=None,
    )  # fmt: skip
    names = {
        "args": args, "aiohttp": aiohttp, "os": os, "sys": sys, "time": time, "tqdm": Any,
        "traceback": traceback, "dataclass": dataclasses.dataclass, "field": dataclasses.field,
        "orjson": json, "warnings": None,
    }  # fmt: skip
    client = pieces(
        source("serving.py"), names, "RequestFuncInput", "RequestFuncOutput", "get_auth_headers",
        "get_request_headers", "_record_server_prompt_len", "_create_bench_client_session",
        "async_request_sglang_generate",
    )  # fmt: skip
    with Stub(kvshare=True, gaps_s=(0.02,)) as stub:
        asked = client["RequestFuncInput"](
            prompt=rows[0].prompt, api_url=f"{stub.url}/generate", prompt_len=rows[0].prompt_len,
            output_len=rows[0].output_len, model="m", lora_name="", image_data=None,
            extra_request_body=rows[0].extra_request_body,
        )  # fmt: skip
        output = asyncio.run(client["async_request_sglang_generate"](asked))
    (body,) = stub.bodies
    assert body["input_ids"] == [1, 2, 3, 4]
    assert body["stream"] is True
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": 3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "custom_params": {"kvshare": kvshare},
    }
    assert (output.success, output.output_len, output.prompt_len) == (True, 3, 4)
    assert output.cached_tokens_details["kvshare"]["prefix_tokens"] == 1
    assert len(output.itl) == 2
