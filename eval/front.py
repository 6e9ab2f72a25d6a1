"""What the evaluation commands have in common: servers, data, errors."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvshare_eval.command_line import plain_command
from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.servers import Mode, Server, ServerError

#: What a server gets on a machine without an accelerator when nothing else is said: the dtype that
#: CPUs are quickest with, and no more memory than leaves room for a second server.
_CPU_FLAGS = (
    "--dtype",
    "float32",
    "--mem-fraction-static",
    "0.4",
    "--max-total-tokens",
    "40000",
    "--sleep-on-idle",
)
_SERVER_FACTS = (
    "version",
    "dtype",
    "device",
    "attention_backend",
    "kv_cache_dtype",
    "page_size",
    "chunked_prefill_size",
    "max_total_num_tokens",
    "tp_size",
)


def server_flags(given: str | None) -> tuple[str, ...]:
    """The flags of a server that is started: those given, else what suits this machine."""
    if given is not None:
        return tuple(shlex.split(given))
    import torch

    return () if torch.accelerator.is_available() else _CPU_FLAGS


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns what the caller can put right into one sentence and exit code 2."""
    try:
        yield
    except ExceptionGroup as group:
        first = _first(group)
        if first is None:
            raise
        _say(first)
    except (EvalError, ServerError) as error:
        _say(error)


def _say(error: Exception) -> None:
    typer.echo(f"kvshare: {error}", err=True)
    raise typer.Exit(2) from None


def _first(group: ExceptionGroup[Exception]) -> EvalError | ServerError | None:
    """An error of ours, if the group holds nothing else."""
    ours, rest = group.split((EvalError, ServerError))
    if ours is None or rest is not None:
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, (EvalError, ServerError))
    return error


def data_source(folder: Path | None, hub: bool) -> DataSource:
    """Where the data comes from.

    Raises:
        EvalError: the folder is not there.
    """
    if folder is not None and not folder.is_dir():
        raise EvalError(f"--data {folder}: no such folder")
    return DataSource(folder, hub)


def one_server(model: str | None, url: str | None, server_args: str | None) -> None:
    """Check which server is meant, before anything is written or started.

    Raises:
        EvalError: neither or both were given, or flags for a server that runs already.
    """
    if (model is None) == (url is None):
        raise EvalError("give either --model, to start a server, or --url, to ask a running one")
    if url is not None and server_args is not None:
        raise EvalError("--server-args: for a server that is started, not for --url")


@contextlib.contextmanager
def server_or_url(
    model: str | None,
    url: str | None,
    flags: Sequence[str],
    *,
    console: Console,
    mode: Mode = "kvshare",
) -> Iterator[str]:
    """The address of a server: the running one, or one that lives as long as the block.

    Exactly one of ``model`` and ``url`` is given, see :func:`one_server`.

    Raises:
        ServerError: it did not start; the message holds the end of its log.
    """
    if url is not None:
        yield url
        return
    assert model is not None
    logs = Path(tempfile.mkdtemp(prefix="kvshare-eval-"))
    server = Server(model, mode=mode, args=flags, log=logs / f"{mode}.log")
    console.print(f"starting a server ({mode}) ...")
    try:
        with server:
            console.print(f"it serves after {server.start_seconds:.0f} s")
            yield server.url
    except Exception:
        console.print(f"the server's log is {server.log}", soft_wrap=True)
        raise
    shutil.rmtree(logs, ignore_errors=True)


def server_facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of a server's settings belongs to a measurement; no path and no address."""
    facts = {key: info[key] for key in _SERVER_FACTS if info.get(key) is not None}
    return {"model": plain_command([str(info.get("served_model_name"))]), **facts}
