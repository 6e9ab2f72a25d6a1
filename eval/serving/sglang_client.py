"""Load from SGLang's own ``bench_serving``, and its results as our records.

Its ``openai`` data set keeps the order of its lines and sends further fields of a line along with
that request. So every line carries the very token ids and sampling parameters that our own client
would send. (Its ``custom`` data set shuffles, tokenises text anew and takes no such fields.)

What it cannot do: replay arrival times, other than a Mooncake file's with prompts of its own; tell
when a request was due or sent. Its TTFT counts from sending, ``due_ms`` and ``sent_ms`` are 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvshare_eval.errors import EvalError
from kvshare_eval.serving.load import Measured, Sender
from kvshare_eval.serving.record import RequestRecord
from kvshare_eval.serving.stream import generate_fields
from kvshare_eval.serving.workloads import LoadRequest, Workload

PROGRAM = (sys.executable, "-m", "sglang.bench_serving")
#: Importing SGLang and reading the tokenizer, on a slow machine.
_START_SECONDS = 300.0
_TAIL_CHARS = 2_000


def why_not(workload: Workload, model: str) -> str | None:
    """Why this workload cannot be sent by ``bench_serving``; ``None`` if it can."""
    if workload.arrivals:
        return f"sglang.bench_serving cannot replay the arrival times of workload {workload.name}"
    if find_spec("sglang") is None:
        return "sglang is not installed here"
    if Path(model).is_dir() and not _has_chat_template(Path(model)):
        return "sglang.bench_serving's data set needs a model with a chat template"
    return None


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").exists():
        return True
    config = model / "tokenizer_config.json"
    return config.exists() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))


def command(
    url: str, model: str, requests: int, rate: float | None, name: str, folder: Path
) -> list[str]:
    """The command line; it reads ``requests.jsonl`` in the folder and writes ``result.jsonl``.

    Args:
        url: the server.
        model: for the tokenizer.
        requests: how many lines there are.
        rate: mean arrivals a second; ``None``: one at a time.
        name: seeds the arrivals.
        folder: for the two files.
    """
    words = [*PROGRAM, "--backend", "sglang", "--base-url", url]
    words += ["--model", model, "--tokenizer", model]
    words += ["--dataset-name", "openai", "--dataset-path", str(folder / "requests.jsonl")]
    words += ["--num-prompts", str(requests), "--seed", str(zlib.crc32(name.encode()))]
    words += ["--request-rate", "inf" if rate is None else str(rate)]
    if rate is None:
        words += ["--max-concurrency", "1"]
    # Its warm-up sends the line's placeholder, not its token ids.
    words += ["--warmup-requests", "0", "--disable-tqdm", "--cache-report", "--output-details"]
    return [*words, "--output-file", str(folder / "result.jsonl")]


def data_line(request: LoadRequest, kvshare: Mapping[str, Any] | None) -> dict[str, Any]:
    """One line of the data set; what stands beside ``messages`` replaces what it would send."""
    fields = generate_fields(request, kvshare)
    return {
        "messages": [{"role": "user", "content": "replaced by input_ids"}],
        "max_tokens": request.output_tokens,
        "input_ids": fields["input_ids"],
        "sampling_params": fields["sampling_params"],
    }


async def bench_serving(
    sender: Sender,
    requests: Sequence[LoadRequest],
    rate: float | None,
    *,
    name: str,
    model: str,
) -> Measured:
    """Run it once over these requests.

    Args:
        sender: where to.
        requests: what is sent.
        rate: mean arrivals a second; ``None``: one at a time.
        name: seeds the arrivals.
        model: for the tokenizer.

    Raises:
        EvalError: it failed, did not end, or left another number of results.
    """
    count = len(requests)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
            for request in requests:
                file.write(json.dumps(data_line(request, sender.kvshare)) + "\n")
        longest_s = _START_SECONDS + sender.timeout_s
        longest_s += count * (1 / rate if rate else sender.timeout_s)
        await _run(command(sender.url, model, count, rate, name, folder), longest_s)
        lines = (folder / "result.jsonl").read_text(encoding="utf-8").splitlines()
    return to_measured(json.loads(lines[-1]), sender.window, count)


async def _run(words: Sequence[str], longest_s: float) -> None:
    # In its own CI it would empty the cache before the load, and with it what the warm-up left.
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_IS_IN_CI"}
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), longest_s)
    except TimeoutError:
        raise EvalError(f"sglang.bench_serving did not end within {longest_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        tail = output.decode(errors="replace").strip()[-_TAIL_CHARS:]
        raise EvalError(f"sglang.bench_serving ended with code {process.returncode}:\n{tail}")


def to_measured(result: Mapping[str, Any], window: str, requests: int) -> Measured:
    """Convert the line that ``--output-details`` writes."""
    columns = ("ttfts", "itls", "input_lens", "output_lens", "errors")
    rows = list(zip(*(result[column] for column in columns), strict=True))
    if len(rows) != requests:
        raise EvalError(f"sglang.bench_serving left {len(rows)} results of {requests} requests")
    details = result.get("cached_tokens_details") or [None] * requests
    cached = result.get("cached_tokens") or [0] * requests
    records = []
    for number, (ttft, gaps, prompt_tokens, output_tokens, error) in enumerate(rows):
        came = ttft > 0  # it writes 0 where no text came
        if not error and not came:
            error = "no text came"
        records.append(
            RequestRecord(
                key=f"{window}/{number}",
                window=window,
                number=number,
                due_ms=0.0,
                sent_ms=0.0,
                ttft_ms=ttft * 1e3 if came else None,
                tbt_ms=tuple(gap * 1e3 for gap in gaps),
                e2e_ms=(ttft + sum(gaps)) * 1e3 if came and not error else None,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached[number] or 0,
                report=dict((details[number] or {}).get("kvshare") or {}),
                error=error or None,
            )
        )
    return Measured(tuple(records), float(result["duration"]))
