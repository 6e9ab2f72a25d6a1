"""A stop by hand (Ctrl-C) that is never lost.

``asyncio.run`` turns it into a cancellation of the task, and a cancellation that meets code which
waits for the end of another cancelled task is taken for that one's. Raised where the loop is, it
ends the loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run(work)``.

    Raises:
        KeyboardInterrupt: at a stop by hand, whatever is going on.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    # asyncio leaves every handler alone but Python's own.
    before = signal.signal(signal.SIGINT, _stop)
    try:
        return asyncio.run(work)
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
