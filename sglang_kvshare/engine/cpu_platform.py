"""A platform on which stock SGLang serves with plain PyTorch: any x86-64 or arm64 CPU.

Seams: ``sglang.srt.platforms.interface.SRTPlatform``, ``sglang.srt.platforms.cpu.CpuDeviceMixin``.
As an out-of-tree platform it needs neither ``SGLANG_USE_CPU_ENGINE`` nor AMX nor ``sgl_kernel``:
SGLang then takes the native forward of every layer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "torch_native"
MEM_FRACTION = 0.5
#: A minute and more of prefill at the speed of plain PyTorch; zeroing more only delays the start.
MAX_TOTAL_TOKENS = 65_536


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on a CPU, with defaults that suit one."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        # Asked before the other defaults, and only when the user named no backend.
        logger.info("KVShare CPU platform chose: --attention-backend %s", ATTENTION_BACKEND)
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device(self, device_id: int = 0) -> str:
        # SGLang splits the default device at its colon, and so wants a text.
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open, and say so. ``server_args`` records assignments."""
        chosen: dict[str, Any] = {}

        def default(field: str, left_open: Any, value: Any) -> None:
            if getattr(server_args, field) == left_open:
                setattr(server_args, field, value)
                chosen[field] = value

        # Half of what is free for weights and KV: the other half of a CPU's memory is not ours.
        default("mem_fraction_static", None, MEM_FRACTION)
        default("max_total_tokens", None, MAX_TOTAL_TOKENS)
        default("sleep_on_idle", False, True)
        if not fast_bfloat16():
            default("dtype", "auto", "float32")
        if chosen:
            logger.info(
                "KVShare CPU platform chose: %s (any flag of yours wins)",
                ", ".join(f"--{key.replace('_', '-')} {value}" for key, value in chosen.items()),
            )


def fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 matrix products run at full speed: only AMX does; AVX-512 BF16 was measured
    about four times slower than fp32 in PyTorch."""
    try:
        return "amx_bf16" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
