"""The schedule of one scheduler process, put together as the configuration wants it.

Seams: ``TreeCacheBuildContext``, the KV pool and its allocator.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.lengths import Lengths, read_estimator
from sglang_kvshare.engine.schedule import Schedule
from sglang_kvshare.matching.sketch import WindowSketcher
from sglang_kvshare.scheduling.parts import ScheduleSettings, build_parts
from sglang_kvshare.scheduling.slo import Slo
from sglang_kvshare.tenants import TenantBook

if TYPE_CHECKING:
    from sglang_kvshare.matching.answered import AnsweredPrompts

logger = logging.getLogger(__name__)


def build_schedule(
    cache: Any, ctx: Any, sketcher: WindowSketcher | None, tenants: TenantBook | None
) -> Schedule:
    """
    Args:
        cache: KVShare's tree cache.
        ctx: ``TreeCacheBuildContext``, with the loaded model.
        sketcher: of prompts; ``None`` where similar donors are not wanted.
        tenants: who may have SLOs of their own, and learns nothing of others.
    """
    config: KVShareConfig = cache.config
    isolated = tenants is not None
    path = Path(config.length_file) if config.length_file else None
    if path is not None and ctx.server_args.nnodes > 1:
        logger.warning("KVShare leaves length_file alone: ranks on other machines cannot read it")
        path = None
    estimator = read_estimator(path, isolated=isolated)
    allocator = ctx.params.token_to_kv_pool_allocator
    settings = settings_of(config, isolated=isolated)
    arguments = ctx.server_args
    if arguments.enable_priority_scheduling and not arguments.disable_priority_preemption:
        # How much it would gain by preempting, SGLang reckons in its own reservations.
        settings = replace(settings, reserve="stock")
        logger.info("KVShare leaves reservations to SGLang, which preempts by priority")
    parts = build_parts(
        settings,
        pool_tokens=int(allocator.size),
        page_tokens=int(ctx.params.page_size),
        bytes_per_token=_bytes_per_token(allocator),
        tenants=None if tenants is None else _slos(tenants),
        lengths=estimator,
    )
    lengths = Lengths(
        estimator,
        _prompts(cache, config, sketcher),
        (config.length_confidence, config.length_confidence_slope),
        # One rank writes, and all read the same file.
        path if ctx.tp_rank == 0 else None,
        cache.fault,
    )
    sign = 0
    if arguments.enable_priority_scheduling:
        sign = -1 if arguments.schedule_low_priority_values_first else 1
    return Schedule(cache, config, parts, lengths, ctx.tp_size, sign)


def settings_of(config: KVShareConfig, *, isolated: bool = False) -> ScheduleSettings:
    """The part of the configuration that is about scheduling."""
    return ScheduleSettings.of(
        config,
        schedule=config.schedule,
        # Copies have an owner of their own, who knows what they take.
        preempt="recompute",
        isolated_lengths=isolated,
        ttft_slo_ms=config.ttft_slo_ms,
        tbt_slo_ms=config.tbt_slo_ms,
    )


def _slos(tenants: TenantBook) -> dict[str, Slo]:
    return {
        name: Slo(tenant.ttft_slo_ms, tenant.tbt_slo_ms)
        for name, tenant in tenants.file.tenants.items()
    }


def _bytes_per_token(allocator: Any) -> int:
    pool = allocator.get_kvcache()
    keys, values = pool.get_kv_size_bytes()
    return max(1, (int(keys) + int(values)) // max(1, int(allocator.size)))


def _prompts(
    cache: Any, config: KVShareConfig, sketcher: WindowSketcher | None
) -> AnsweredPrompts | None:
    """Answers to similar prompts; an embedder takes too long for every prompt's end."""
    if sketcher is None or config.embedder or cache.mirror.similar is None:
        return None
    from sglang_kvshare.matching.answered import AnsweredPrompts

    return AnsweredPrompts(sketcher)
