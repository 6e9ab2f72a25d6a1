"""Processes that have SGLang imported already: forked, so that each starts in a second or two.

SGLang keeps much in module globals and builds one scheduler a process; a process for each keeps
them apart, and the hooks of KVShare out of the process that asks.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from sglang_kvshare.config import KVShareConfig


class ChildFailed(RuntimeError):
    """The function raised; the message is its traceback."""


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` in a new process that has SGLang, and return what it returns.

    ``function`` must be importable; what it takes and returns must pickle.

    Raises:
        ChildFailed: the function raised, or its process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvshare_eval.live.preload"])
    with _scheduler_environment():
        forkserver.ensure_running()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        failed, result = ours.recv()
    except EOFError:
        process.join()
        raise ChildFailed(f"the process ended with exit code {process.exitcode}") from None
    process.join()
    if failed:
        raise ChildFailed(result)
    return result


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        connection.send((False, function(*args)))
    except BaseException as error:
        connection.send((True, "".join(traceback.format_exception(error))))


@contextmanager
def _scheduler_environment() -> Iterator[None]:
    """What SGLang reads when it is imported; the asking process keeps its own."""
    from kvshare_eval.live.scheduler import prepare

    before = dict(os.environ)
    try:
        prepare(KVShareConfig())
        # A fork takes no threads along, and the models here have no work for a second one.
        os.environ["OMP_NUM_THREADS"] = "1"
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
