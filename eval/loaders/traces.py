"""Traces of requests: when they came and how long they were, without their text.

Files: Azure's LLM inference traces of 2023 (``AzureLLMInferenceTrace_conv.csv``, ``_code.csv``) and
Mooncake's conversation trace (JSONL). There is nothing built in: a made-up trace is no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_csv, read_jsonl
from kvshare_eval.loaders.source import DataSource

AZURE = {
    kind: DataSet(
        f"azure-{kind}", (f"AzureLLMInferenceTrace_{kind}.csv", f"azure_llm_2023_{kind}.csv")
    )
    for kind in ("conv", "code")
}
MOONCAKE = DataSet("mooncake", ("conversation_trace.jsonl", "mooncake_conversation_trace.jsonl"))
#: Tokens that one block hash of the Mooncake trace stands for.
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the trace's first request.
        prompt_tokens: length of the prompt.
        output_tokens: length of the answer.
        block_hashes: which blocks of :data:`BLOCK_TOKENS` the prompt is made of, in order, if
            the trace says so; equal numbers are equal blocks behind equal prefixes.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()


def load_azure_trace(source: DataSource, kind: str = "conv") -> Iterator[TraceRequest]:
    """Azure's trace of ``kind`` ``conv`` or ``code``, in the order of the file."""
    if kind not in AZURE:
        raise EvalError(f"Azure trace {kind!r}: allowed are {', '.join(AZURE)}")
    path = _path(AZURE[kind], source)
    return _from_first(_azure(row, path, number) for number, row in enumerate(read_csv(path), 1))


def load_mooncake_trace(source: DataSource) -> Iterator[TraceRequest]:
    """Mooncake's conversation trace, in the order of the file."""
    path = _path(MOONCAKE, source)
    return _from_first(
        parsed(_mooncake, row, f"{path.name}: line {number}")
        for number, row in enumerate(read_jsonl(path), 1)
    )


#: What a command line calls a trace -> how it is loaded.
TRACES: dict[str, Callable[[DataSource], Iterator[TraceRequest]]] = {
    "azure_llm_2023_conv": partial(load_azure_trace, kind="conv"),
    "azure_llm_2023_code": partial(load_azure_trace, kind="code"),
    "mooncake_conversation_trace": load_mooncake_trace,
}


def load_trace(source: DataSource, name: str) -> Iterator[TraceRequest]:
    """A trace by name, in order of arrival, as far as the caller goes.

    Raises:
        EvalError: unknown trace, no file of it, or a line that cannot be read.
    """
    if name not in TRACES:
        raise EvalError(f"unknown trace {name!r}: allowed are {', '.join(TRACES)}")
    return TRACES[name](source)


def _path(trace: DataSet, source: DataSource) -> Path:
    place = trace.find(source)
    if place is None:
        raise EvalError(f"trace {trace.name}: {trace.accepted()}")
    assert not isinstance(place, HubSet), "no trace has a hub name"
    return place


def _from_first(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Count arrivals from the first request."""
    start_s: float | None = None
    for request in requests:
        start_s = request.arrival_s if start_s is None else start_s
        yield TraceRequest(
            round(request.arrival_s - start_s, 6),
            request.prompt_tokens,
            request.output_tokens,
            request.block_hashes,
        )


def _azure(row: Row, path: Path, number: int) -> TraceRequest:
    def make(row: Row) -> TraceRequest:
        # Reckoned from a fixed time: seconds since 1970 in a float lose the sub-microseconds, and
        # the time zone of the machine must not matter.
        arrival = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=None)
        since = (arrival - datetime(2023, 11, 1)).total_seconds()
        return TraceRequest(since, int(row["ContextTokens"]), int(row["GeneratedTokens"]))

    return parsed(make, row, f"{path.name}: row {number}")


def _mooncake(row: Row) -> TraceRequest:
    return TraceRequest(
        float(row["timestamp"]) / 1000,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(int(block) for block in row["hash_ids"]),
    )
