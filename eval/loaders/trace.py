"""Traces of real servers: when requests came, how long they were, and what they had in common.

Two public formats, each in the file names of its publisher, gzipped or not:

* ``azure_llm_2023_conv``, ``azure_llm_2023_code``: CSV with ``TIMESTAMP``, ``ContextTokens`` and
  ``GeneratedTokens`` (Azure LLM inference traces 2023);
* ``mooncake_conversation_trace``: JSON lines with ``timestamp`` in ms, ``input_length``,
  ``output_length`` and ``hash_ids``, one for every 512 tokens of the prompt (Mooncake, FAST'25).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders.source import DataSource

#: Tokens that one block hash of the Mooncake traces stands for.
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: from the trace's first request.
        prompt_tokens, output_tokens: lengths, at least 1.
        block_hashes: equal numbers stand for equal blocks of :data:`BLOCK_TOKENS` tokens, in the
            prompt's order, the last one cut off by the prompt's end; empty where not published.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()


def _azure(lines: TextIO) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in csv.DictReader(lines):
        # Seven digits of a second, of which Python reads six.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or moment
        yield TraceRequest(
            (moment - start).total_seconds(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )


def _mooncake(lines: TextIO) -> Iterator[TraceRequest]:
    start: float | None = None
    for line in filter(str.strip, lines):
        row = json.loads(line)
        start = row["timestamp"] if start is None else start
        yield TraceRequest(
            (row["timestamp"] - start) / 1e3,
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            tuple(row["hash_ids"]),
        )


#: Trace -> the ending of its file and how a line of it is read.
TRACES: dict[str, tuple[str, Callable[[TextIO], Iterator[TraceRequest]]]] = {
    "azure_llm_2023_conv": ("csv", _azure),
    "azure_llm_2023_code": ("csv", _azure),
    "mooncake_conversation_trace": ("jsonl", _mooncake),
}


def load_trace(source: DataSource, name: str) -> Iterator[TraceRequest]:
    """Read a trace from the folder, in order of arrival, as far as the caller goes.

    Raises:
        EvalError: unknown trace, no folder, no such file in it, or a line that cannot be read.
    """
    if name not in TRACES:
        raise EvalError(f"unknown trace {name!r}: allowed are {', '.join(TRACES)}")
    ending, read = TRACES[name]
    if source.folder is None:
        raise EvalError(f"trace {name} needs a data folder that holds {name}.{ending}[.gz]")
    for file in (f"{name}.{ending}.gz", f"{name}.{ending}"):
        if (source.folder / file).exists():
            return _read(source.folder / file, read)
    raise EvalError(f"{source.folder} holds no {name}.{ending}[.gz]")


def _read(path: Path, read: Callable[[TextIO], Iterator[TraceRequest]]) -> Iterator[TraceRequest]:
    unpack = gzip.open if path.suffix == ".gz" else open
    with unpack(path, "rt", encoding="utf-8") as lines:
        try:
            yield from read(lines)
        except (KeyError, TypeError, ValueError) as error:
            raise EvalError(f"{path.name} is no such trace: {error!r}") from None
