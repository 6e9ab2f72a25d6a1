"""A stop by hand, wherever it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from kvshare_eval import interruptible


async def stopped_while_another_task_ends() -> str:
    """The stop arrives while a cancelled task is waited for, and is taken for that one's end."""
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        os.kill(os.getpid(), signal.SIGINT)
        await task
    return "went on"


def test_it_is_not_taken_for_something_else():
    before = signal.getsignal(signal.SIGINT)
    # The control: this is how it is lost.
    assert asyncio.run(stopped_while_another_task_ends()) == "went on"
    with pytest.raises(KeyboardInterrupt):
        interruptible.run(stopped_while_another_task_ends())
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_not_stopped_returns():
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert interruptible.run(work()) == 7

    async def beside() -> int:
        # In another thread no handler can be set.
        return await asyncio.to_thread(interruptible.run, work())

    assert asyncio.run(beside()) == 7
