"""Whether the plain-CPU platform serves this process.

Seam: entry-point group ``sglang.srt.platforms`` (``sglang.srt.platforms._resolve_platform``).
This module must not import ``sglang.srt.platforms``: it runs while that module resolves itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from sglang_kvshare.config import ENV_SWITCH

logger = logging.getLogger(__name__)

PLATFORM_GROUP = "sglang.srt.platforms"
PLATFORM_NAME = "kvshare_cpu"
PLATFORM_CLASS = "sglang_kvshare.engine.cpu_platform.PlainCpuPlatform"


def choose_cpu_platform() -> str | None:
    """The class name, or ``None`` to step aside."""
    if not _asked_for(os.environ, sys.argv):
        return None
    named = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    if not named and (_accelerator() or _stock_cpu_engine(os.environ) or _other_platform()):
        return None
    return PLATFORM_CLASS


def _asked_for(env: Mapping[str, str], argv: Sequence[str]) -> bool:
    """By ``--kvshare``, ``KVSHARE=1`` (children inherit it), or SGLang's own selection by name."""
    return (
        env.get("SGLANG_PLATFORM") == PLATFORM_NAME
        or "--kvshare" in argv
        or env.get(ENV_SWITCH, "").strip().lower() in ("1", "true", "yes", "on")
    )


def _accelerator() -> bool:
    import torch

    present = torch.accelerator.is_available()
    if present:
        logger.info("KVShare leaves the platform to the accelerator that torch found")
    return bool(present)


def _stock_cpu_engine(env: Mapping[str, str]) -> bool:
    """SGLang's own CPU platform was asked for."""
    return env.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def _other_platform() -> bool:
    """Another installed platform plug-in takes this machine."""
    return any(_activates(entry) for entry in entry_points(group=PLATFORM_GROUP))


def _activates(entry: EntryPoint) -> bool:
    if entry.name == PLATFORM_NAME:
        return False
    try:
        taken = entry.load()() is not None
    except Exception:
        # SGLang logs the failure itself and goes on without that platform; so do we.
        return False
    if taken:
        logger.info("KVShare leaves the platform to the plug-in %r", entry.name)
    return taken
