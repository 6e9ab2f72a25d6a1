"""The hooks of an active KVShare, in one list; each is a function of the module that owns it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from sglang_kvshare.engine.seams import STREAMS, WEIGHT_UPDATES, check_hooked

Hook = tuple[str, Callable[..., Any]]


def hooks() -> tuple[Hook, ...]:
    """(target, function), every one of the kind AROUND."""
    from sglang_kvshare.engine import (
        admission,
        control,
        forward,
        metrics,
        ordering,
        pacing,
        penalties,
        preempting,
        report,
        requests,
        retention,
        schedule_policy_values,
        swapping,
        weights,
    )
    from sglang_kvshare.engine.activation import active_config

    srt = "sglang.srt."
    # What a patch to SGLang makes unnecessary, where it is applied (docs/patches.md).
    spared_by_patches: tuple[tuple[bool, Hook], ...] = (
        (
            schedule_policy_values.stands_in(active_config()),
            (srt + "managers.schedule_policy.SchedulePolicy.calc_priority", ordering.calc_priority),
        ),
        (
            swapping.asked_by_sglang(),
            (srt + "managers.schedule_batch.release_req", swapping.release_req),
        ),
    )
    return (
        (srt + "sampling.sampling_params.SamplingParams.verify", requests.verify),
        (srt + "managers.scheduler.Scheduler._create_generation_req", requests.create),
        (srt + "managers.scheduler.Scheduler.get_prefill_adder_class", admission.adder_class),
        (
            srt + "managers.scheduler.Scheduler.update_running_batch",
            preempting.update_running_batch,
        ),
        (srt + "managers.scheduler.Scheduler._arm_prefill_decode_interval", pacing.arm),
        (
            srt + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
            penalties.prepare_for_extend,
        ),
        (
            srt + "managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
            preempting.retraction_order,
        ),
        (srt + "managers.scheduler.Scheduler.get_internal_state", control.get_internal_state),
        (srt + "managers.scheduler.Scheduler.get_next_batch_to_run", metrics.step),
        (srt + "managers.scheduler.Scheduler.get_next_batch_to_run", retention.step),
        (srt + "managers.scheduler.Scheduler.get_next_batch_to_run", swapping.step),
        *(hook for spared, hook in spared_by_patches if not spared),
        (
            srt + "managers.tp_worker.TpModelWorker.forward_batch_generation",
            forward.forward_batch_generation,
        ),
        (
            srt + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
            ".get_cached_tokens_details",
            report.cached_tokens_details,
        ),
        *((target, weights.changed) for target in WEIGHT_UPDATES),
    )


def http_hooks() -> tuple[Hook, ...]:
    """Hooks of the process that serves HTTP; their modules are heavy to import elsewhere."""
    from sglang_kvshare.engine import report, requests, tenant_requests

    entry = "sglang.srt.entrypoints."
    return (
        (entry + "http_server.serve_generate_request", requests.serve_generate),
        (entry + "openai.serving_base.OpenAIServingBase.handle_request", requests.handle_openai),
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            tenant_requests.generate,
        ),
        *((target, tenant_requests.entrance) for target in STREAMS),
        (entry + "openai.utils.cached_tokens_details_from_dict", report.openai_details),
    )


def launcher_hooks() -> tuple[Hook, ...]:
    """Hooks of the process that launches the schedulers."""
    from sglang_kvshare.engine import verdict

    target = "sglang.srt.entrypoints.engine._wait_for_scheduler_ready"
    return ((target, verdict.wait_for_schedulers),)


def register_backend() -> None:
    """Make the tree cache known under its name. Safe to call again."""
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
    )

    from sglang_kvshare.engine.activation import BACKEND
    from sglang_kvshare.engine.tree_cache import build_tree_cache

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, build_tree_cache)


def install() -> None:
    """Register the tree cache and all hooks, and apply them. Safe to call again."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_kvshare.engine import schedule_policy_values

    register_backend()
    schedule_policy_values.register()
    _register(hooks())
    HookRegistry.apply_hooks()


def install_launcher() -> None:
    """The hooks of the launching process; called when a start has been accepted."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register(launcher_hooks())
    HookRegistry.apply_hooks()
    verify(launcher_hooks())


def install_http() -> None:
    """The hooks of the HTTP process; called when the server is about to be launched."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_kvshare.engine import admin_routes
    from sglang_kvshare.engine.report import openai_details_class

    _register(http_hooks())
    HookRegistry.apply_hooks()
    verify(http_hooks())
    # Built now, so that a mismatch stops the start instead of the first response.
    openai_details_class()
    admin_routes.install()


def verify(expected: tuple[Hook, ...] | None = None) -> None:
    """Raise unless every hook stands in this process (see :func:`check_hooked`)."""
    for target, function in hooks() if expected is None else expected:
        check_hooked(target, while_active(function))


@cache
def while_active(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` while KVShare is on, and SGLang's own function otherwise: a hook that stands
    cannot be taken away again when the scheduler finds that KVShare cannot serve."""
    from sglang_kvshare.engine.activation import active_config

    @wraps(function)
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if active_config() is None:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return hook


def _register(wanted: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in wanted:
        hook = while_active(function)
        if not any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType.AROUND)
