"""What a scheduler process found out about KVShare, told to the process that launched it.

Seam: ``sglang.srt.entrypoints.engine._wait_for_scheduler_ready``, where the launcher waits for all
schedulers of its machine.

SGLang's schedulers answer "ready" or end. A refusal is a third answer, with a sentence. It goes
through a file, because it must also pass the controller between launcher and schedulers that
``--dp-size`` puts there. The file is written in a refusal only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_kvshare.config import ENV_VERDICT
from sglang_kvshare.engine.activation import active_config, switch_off
from sglang_kvshare.engine.support import Unsupported

#: The launcher is a server's command, which ends with a sentence, and no user's program.
_ends_process = False


def expect(*, ends_process: bool) -> None:
    """Choose the file of the next launch; the children inherit its name."""
    global _ends_process
    _ends_process = ends_process
    name = f"kvshare-verdict-{uuid.uuid4().hex}"
    os.environ[ENV_VERDICT] = str(Path(tempfile.gettempdir()) / name)


def refuse(reason: str) -> None:
    """Called by a scheduler process. Several may call it; one sentence is kept.

    A launcher that cannot be told this way learns of it as of any other failure.
    """
    path = os.environ.get(ENV_VERDICT)
    if not path:
        return
    own = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        # Renamed when whole, so that no half of a sentence is read.
        own.write_text(reason, encoding="utf-8")
        own.replace(path)


def take() -> str | None:
    """Called by the launcher: the sentence, once; ``None`` while no scheduler has refused."""
    path = os.environ.get(ENV_VERDICT)
    if not path:
        return None
    try:
        reason = Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
    with contextlib.suppress(OSError):
        Path(path).unlink()
    return reason


class _SchedulerRefused(Exception):
    """Raised in the launcher's main thread when a scheduler that refused says that it ends."""


def wait_for_schedulers(original: Any, readers: Any, processes: Any) -> Any:
    """Hook of ``_wait_for_scheduler_ready``; runs only while KVShare is on.

    Raises:
        SystemExit: a scheduler refused, and the process is the command that starts a server.
        Unsupported: a scheduler refused, and the process is a program that uses ``Engine``.
    """
    config = active_config()
    if config is not None and config.optional:
        infos = original(readers, processes)
        if take() is not None:
            # The schedulers serve stock, and have said why.
            switch_off()
        return infos
    try:
        with _refusals_first():
            return original(readers, processes)
    except Exception as error:
        reason = str(error) if isinstance(error, _SchedulerRefused) else take()
        if reason is None:
            raise
        if _ends_process:
            # The command ends its children on the way out; this is its last line.
            raise SystemExit(f"KVShare: {reason}") from None
        raise Unsupported(reason) from None


@contextlib.contextmanager
def _refusals_first() -> Iterator[None]:
    """A scheduler that fails sends ``SIGQUIT``, at which SGLang's launcher kills itself. It shall
    say the sentence first if there is one; any other failure is SGLang's to handle."""
    stock = signal.getsignal(signal.SIGQUIT)
    if threading.current_thread() is not threading.main_thread() or not callable(stock):
        yield
        return

    def handler(signum: int, frame: Any) -> None:
        reason = take()
        if reason is not None:
            raise _SchedulerRefused(reason)
        stock(signum, frame)

    signal.signal(signal.SIGQUIT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGQUIT) is handler:
            signal.signal(signal.SIGQUIT, stock)
