"""Every symbol of SGLang that KVShare leans on, with the signature it was tested with.

SGLang only logs a hook that it cannot apply, so that the table is checked here: all signatures
before the arguments are resolved, and in the scheduler process that each hook stands.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

TESTED_VERSION = "0.5.23"


class SeamError(RuntimeError):
    """SGLang is not as expected; the message names the symbol and both versions."""


@dataclass(frozen=True)
class Seam:
    """``parameters``: names in order, or ``None`` for a symbol that is no function.

    ``fields``: names that a dataclass must declare.
    """

    symbol: str
    parameters: str | None
    why: str
    fields: str = ""


_SRT = "sglang.srt."
_RADIX = _SRT + "mem_cache.radix_cache."
_EVENTS = _SRT + "mem_cache.events.KVCacheEventRecorder."
#: What changes the model's weights in a scheduler process.
WEIGHT_UPDATES = tuple(
    _SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager." + name
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
)
#: Entrances that begin a stream on their own.
STREAMS = tuple(
    _SRT + "entrypoints." + name
    for name in (
        "anthropic.serving.AnthropicServing.handle_messages",
        "ollama.serving.OllamaServing.handle_chat",
        "ollama.serving.OllamaServing.handle_generate",
    )
)
SEAMS = (
    # Command line and start-up
    Seam(_SRT + "server_args.ServerArgs.add_cli_args", "parser", "flags"),
    Seam(_SRT + "server_args.ServerArgs.from_cli_args", "args", "flags"),
    Seam(_SRT + "server_args.ServerArgs.resolve_once", "self", "tree cache choice, refusals"),
    Seam(_SRT + "arg_groups.overrides.resolving_view", "server_args", "resolved arguments"),
    Seam(_SRT + "arg_groups.overrides.model_config_of", "server_args", "refusals by model"),
    Seam(_SRT + "configs.hybrid_arch.mambaish_config", "model_config", "refusals by model"),
    Seam(
        _SRT + "entrypoints.engine._wait_for_scheduler_ready",
        "scheduler_pipe_readers, scheduler_procs",
        "refusals by a scheduler",
    ),
    Seam(_SRT + "platforms.interface.SRTPlatform", None, "plain CPU platform"),
    Seam(_SRT + "platforms.cpu.CpuDeviceMixin", None, "plain CPU platform"),
    # Requests and responses
    Seam(_SRT + "sampling.sampling_params.SamplingParams.verify", "self, vocab_size", "HTTP 400"),
    Seam(
        _SRT + "entrypoints.http_server.serve_generate_request",
        "obj, request",
        "HTTP 400 for streams",
    ),
    Seam(
        _SRT + "entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "self, request, raw_request",
        "HTTP 400 for streams",
    ),
    Seam(
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "self, obj, request",
        "tenants",
    ),
    Seam(_SRT + "managers.tokenizer_manager.TokenizerManager.server_status", None, "tenants"),
    *(Seam(target, "self, request, raw_request", "HTTP 403 for streams") for target in STREAMS),
    Seam(_SRT + "entrypoints.http_server.get_global_state", "", "tenants"),
    Seam(
        _SRT + "managers.io_struct.GenerateReqInput",
        None,
        "tenants",
        fields="sampling_params cache_salt extra_key session_params",
    ),
    Seam(
        _SRT + "entrypoints.openai.utils.cached_tokens_details_from_dict",
        "details",
        "report in OpenAI responses",
    ),
    Seam(_SRT + "entrypoints.openai.protocol.CachedTokensDetails", None, "report (OpenAI)"),
    Seam(_SRT + "entrypoints.openai.protocol.SglExt", None, "report (OpenAI)"),
    Seam(
        _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".get_cached_tokens_details",
        "self, req",
        "report",
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._create_generation_req",
        "self, recv_req, args, kwargs",
        "per-request state",
    ),
    # Tree cache
    Seam(_SRT + "mem_cache.registry.register_radix_cache_backend", "name, factory", "tree cache"),
    Seam(_SRT + "mem_cache.registry.TreeCacheBuildContext", None, "tree cache"),
    Seam(_SRT + "mem_cache.registry.default_radix_cache_factory", "ctx", "stock tree cache"),
    Seam(_RADIX + "RadixCache.reset", "self", "run index"),
    Seam(_RADIX + "RadixCache.match_prefix", "self, params", "reuse=off"),
    Seam(
        _RADIX + "RadixCache._insert_helper",
        "self, node, key, value, priority, inserted_len",
        "run index",
    ),
    Seam(
        _RADIX + "RadixCache._split_node",
        "self, key, child, split_len",
        "run index",
    ),
    Seam(_RADIX + "RadixCache._delete_leaf", "self, node", "run index"),
    Seam(_RADIX + "RadixCache.dec_lock_ref", "self, node, params", "forget, time to live"),
    Seam(_RADIX + "RadixCache.evict", "self, params", "donor locks"),
    Seam(
        _RADIX + "RadixCache.checkpoint",
        "self, req, up_to",
        "publish exact KV only",
    ),
    Seam(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache.lock", "self, node", "donor locks"),
    Seam(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache.unlock", "self, lock", "donor locks"),
    Seam(
        _SRT + "mem_cache.base_prefix_cache.BasePrefixCache.on_release",
        "self, req, checkpointed",
        "donor locks",
    ),
    Seam(_RADIX + "RadixKey.child_key_at", "self, offset, page_size", "branches"),
    Seam(
        _RADIX + "RadixKey.match_at",
        "self, other, offset, page_size",
        "branches",
    ),
    Seam(
        _RADIX + "RadixCache._match_prefix_helper",
        "self, node, key",
        "branches",
    ),
    Seam(_RADIX + "RadixCache.path_device_indices", "self, node", "branches"),
    Seam(
        _EVENTS + "record_store",
        "self, node, medium, session_id",
        "events",
    ),
    Seam(_EVENTS + "record_remove", "self, node, medium", "events"),
    *(Seam(target, "self, recv_req", "donors go with their weights") for target in WEIGHT_UPDATES),
    # Swapping
    Seam(
        _SRT + "managers.schedule_batch.release_req",
        "req, remaing_req_count, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, "
        "hisparse_coordinator, offload_kv",
        "swap at preemption",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ScheduleBatch.release_req",
        "self, idx, remaing_req_count, offload_kv",
        "preemption before memory is short",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "self",
        "penalties of resumed requests",
    ),
    Seam(
        _SRT + "sampling.penaltylib.BatchedPenalizerOrchestrator",
        None,
        "penalties of resumed requests",
    ),
    Seam(_SRT + "managers.schedule_batch.Req.detach_kv", "self", "rows kept until copied"),
    Seam(_SRT + "mem_cache.memory_pool.ReqToTokenPool.free", "self, req", "rows kept until copied"),
    *(
        Seam(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache." + name, parameters, why)
        for name, parameters, why in (
            ("claim_kv_row", "self, req", "rows kept until copied"),
            ("session_records", "self", "rows kept until copied"),
            ("free_kv_row", "self, kv, ranges", "rows kept until copied"),
            ("init_load_back", "self, params", "copies back"),
            ("load_back_is_cache_owned", "self", "copies back"),
            ("prefix_device_indices", "self, req", "copies back"),
            ("release_aborted_request", "self, handle", "copies of aborted requests"),
        )
    ),
    # Admission
    Seam(
        _SRT + "managers.scheduler.Scheduler.get_prefill_adder_class", "self", "plan at admission"
    ),
    Seam(
        _SRT + "managers.schedule_policy.PrefillAdder.add_one_req",
        "self, req, has_chunked_req, truncation_align_size",
        "plan at admission",
    ),
    Seam(
        _SRT + "managers.schedule_policy.PrefillAdder._select_prefill_admission",
        "self, req, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size, "
        "has_chunked_req",
        "prompts that stay in one chunk",
    ),
    Seam(
        _SRT + "managers.schedule_policy._PrefillAdmission",
        None,
        "prompts that stay in one chunk",
        fields="prefix_len extend_len max_new_tokens is_chunked",
    ),
    Seam(_SRT + "managers.schedule_policy.AddReqResult.CONTINUE", None, "requests that wait"),
    Seam(
        _SRT + "managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
        None,
        "prompts that stay in one chunk",
    ),
    # Scheduling
    Seam(
        _SRT + "managers.schedule_policy.SchedulePolicy.calc_priority",
        "self, waiting_queue, running_batch, processed_tokens",
        "order of the queue",
    ),
    Seam(
        _SRT + "managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
        "self, req",
        "reservation by estimate",
    ),
    Seam(
        _SRT + "managers.schedule_batch.Req.init_next_round_input",
        "self, tree_cache, cow_mamba",
        "order of the queue",
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler.update_running_batch",
        "self, batch",
        "preemption before KV runs short",
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._arm_prefill_decode_interval",
        "self, batch",
        "decode steps between prefills",
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._reqs_finishing_inflight",
        "self, batch",
        "preemption before KV runs short",
    ),
    Seam(
        _SRT + "managers.schedule_policy.PrefillAdder.add_chunked_req",
        "self, req",
        "reservation by estimate",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        "reqs",
        "victims",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ScheduleBatch.filter_batch",
        "self, reqs_to_exclude, keep_indices",
        "preemption before KV runs short",
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._add_request_to_queue",
        "self, req, is_retracted",
        "preemption before KV runs short",
    ),
    # The operator's questions
    Seam(
        _SRT + "managers.scheduler.Scheduler.get_internal_state",
        "self, recv_req",
        "operator's questions",
    ),
    Seam(_SRT + "managers.io_struct.GetInternalStateReq", None, "operator's questions"),
    Seam(_SRT + "managers.io_struct.GetInternalStateReqOutput", None, "operator's questions"),
    Seam(
        _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "self",
        "operator's questions",
    ),
    Seam(_SRT + "utils.auth.auth_level", "level", "who may ask them"),
    Seam(_SRT + "utils.auth.AuthLevel.ADMIN_OPTIONAL", None, "who may ask them"),
    # Metrics
    Seam(
        _SRT + "managers.scheduler.Scheduler.get_next_batch_to_run",
        "self, running_batch, last_batch",
        "gauges, log line",
    ),
    Seam(_SRT + "runtime_context.get_parallel", "", "labels of the metrics, ranks"),
    Seam(_SRT + "runtime_context.get_observability", "", "labels of the metrics"),
    Seam(_SRT + "runtime_context.get_serving", "", "labels of the metrics"),
    # Forward
    Seam(
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, "
        "capture_hidden_mode, return_kv_loc_plan",
        "placement and narrowing on the forward stream",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ScheduleBatch",
        None,
        "rows of a batch",
        fields="reqs tree_cache forward_mode prefix_lens extend_lens out_cache_loc input_ids "
        "prefill_input_ids_cpu req_pool_indices req_pool_indices_cpu extend_num_tokens seq_lens "
        "seq_lens_cpu seq_lens_sum orig_seq_lens return_logprob top_logprobs_nums "
        "token_ids_logprobs extend_logprob_start_lens extend_input_logprob_token_ids "
        "is_prefill_only spec_info sampling_info has_grammar multimodal_inputs decoding_reqs",
    ),
    Seam(
        _SRT + "layers.vocab_parallel_embedding.VocabParallelEmbedding.forward",
        "self, input_",
        "sketches",
    ),
    Seam(
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm, "
        "extend_position_info, spec_mrope_positions, kv_loc_plan, write_cols",
        "probe pass",
    ),
    Seam(
        _SRT + "model_executor.model_runner.ModelRunner.forward",
        "self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend, "
        "split_forward_count",
        "probe pass",
    ),
    Seam(_SRT + "model_executor.forward_batch_info.CaptureHiddenMode", None, "probe pass"),
    Seam(
        _SRT + "model_executor.forward_batch_info.ForwardBatch",
        None,
        "narrowing between layers",
        fields="positions out_cache_loc req_pool_indices extend_seq_lens extend_seq_lens_cpu "
        "extend_num_tokens extend_logprob_start_lens_cpu residual_stream extend_prefix_lens "
        "extend_prefix_lens_cpu extend_start_loc seq_lens seq_lens_cpu seq_lens_sum "
        "orig_seq_lens req_pool_indices_cpu batch_size",
    ),
    Seam(
        _SRT + "managers.schedule_batch.ReqKvInfo",
        None,
        "publish exact KV only",
        fields="cache_protected_len cache_inserted_len req_pool_idx kv_committed_len "
        "kv_allocated_len",
    ),
    Seam(
        _SRT + "model_executor.forward_context.forward_context", "ctx, forward_batch", "attention"
    ),
    Seam(_SRT + "model_executor.forward_context.ForwardContext", None, "attention"),
    Seam(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.forward",
        "self, q, k, v, layer, forward_batch, save_kv_cache, kwargs",
        "attention",
    ),
    Seam(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        "self, layer, loc_info, cache_k, cache_v, k_scale, v_scale, layer_id_override, dcp_kv_mask",
        "narrowed attention writes KV",
    ),
    Seam(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.get_key_buffer",
        "self, layer_id",
        "placement",
    ),
    Seam(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.get_value_buffer",
        "self, layer_id",
        "placement",
    ),
    Seam(
        _SRT + "layers.layer_boundary.residual.batch.to_pp",
        "hidden_states, forward_batch",
        "narrowing between layers",
    ),
    Seam(
        _SRT + "layers.layer_boundary.stage.StageBoundary.from_pp",
        "self, tensors, forward_batch, allow_missing_residual",
        "narrowing between layers",
    ),
    Seam(
        _SRT + "layers.rotary_embedding.base.RotaryEmbedding._compute_cos_sin_cache",
        "self",
        "fp32 rotation table",
    ),
    Seam(
        _SRT + "layers.rotary_embedding.rope_variant.Phi3LongRoPEScaledRotaryEmbedding"
        "._compute_cos_sin_cache",
        "self, max_position_embeddings, rescale_factors, mscale",
        "fp32 rotation table of LongRoPE",
    ),
    Seam(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.is_quantized_kv_cache",
        None,
        "refusal of unknown pools",
    ),
)


_ATTENTION = _SRT + "layers.attention."


def _backend_seams(name: str, *more: tuple[str, str]) -> tuple[Seam, ...]:
    methods = (("init_forward_metadata", "self, forward_batch"), *more)
    return tuple(
        Seam(_ATTENTION + name + "." + method, parameters, "narrowed attention")
        for method, parameters in methods
    )


#: Of the attention backends: what is needed where one of them serves; not to be imported elsewhere.
BACKEND_SEAMS = {
    "torch_native": (),
    "flashinfer": _backend_seams("flashinfer_backend.FlashInferAttnBackend"),
    "triton": _backend_seams(
        "triton_backend.TritonAttnBackend",
        (
            "forward_extend",
            "self, q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors",
        ),
    ),
    "fa3": _backend_seams("flashattention_backend.FlashAttentionBackend"),
}


#: Symbols that the patches in ``patches/`` add to SGLang; where they are, they must fit too.
PATCH_SEAMS = (
    Seam(_SRT + "arg_groups.choices.add_schedule_policy_choices", None, "--schedule-policy"),
    Seam(_SRT + "arg_groups.choices.SCHEDULE_POLICY_CHOICES", None, "--schedule-policy"),
    Seam(
        _SRT + "managers.schedule_policy.register_schedule_policy",
        "name, factory",
        "--schedule-policy",
    ),
    Seam(
        _SRT + "mem_cache.base_prefix_cache.BasePrefixCache.backup_on_retract",
        "self, req",
        "swapping",
    ),
    Seam(
        _SRT + "managers.schedule_batch.register_retraction_policy",
        "name, order",
        "--retraction-policy",
    ),
)


def found(seams: Iterable[Seam] = PATCH_SEAMS) -> list[Seam]:
    """Those that the installed SGLang has."""
    return [seam for seam in seams if _resolved(seam) is not None]


def _resolved(seam: Seam) -> Any:
    try:
        return pkgutil.resolve_name(seam.symbol)
    except (ImportError, AttributeError):
        return None


def check_seams(seams: Iterable[Seam] = SEAMS) -> None:
    """Compare every seam with the installed SGLang.

    Raises:
        SeamError: the first symbol that is missing or has another signature.
    """
    for seam in seams:
        try:
            symbol = pkgutil.resolve_name(seam.symbol)
        except (ImportError, AttributeError) as error:
            raise SeamError(_mismatch(seam, f"is missing ({error})")) from error
        declared = {field.name for field in _declared(symbol)}
        if missing := [name for name in seam.fields.split() if name not in declared]:
            raise SeamError(_mismatch(seam, f"has no field {missing[0]}"))
        if seam.parameters is None:
            continue
        found = ", ".join(inspect.signature(inspect.unwrap(symbol)).parameters)
        # A bound classmethod has no `cls`, an unwrapped hook on one has.
        if found.removeprefix("cls, ") != seam.parameters:
            raise SeamError(_mismatch(seam, f"takes ({found}), expected ({seam.parameters})"))


def _declared(symbol: Any) -> tuple[Any, ...]:
    return dataclasses.fields(symbol) if dataclasses.is_dataclass(symbol) else ()


def check_hooked(target: str, hook: Callable[..., Any]) -> None:
    """Prove that ``hook`` stands on ``target`` in this process.

    Raises:
        SeamError: SGLang logged a failure to apply it, or another plug-in replaced it.
    """
    function = pkgutil.resolve_name(target)
    function = getattr(function, "__func__", function)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return
        function = getattr(function, "__wrapped__", None)
    raise SeamError(f"the hook on {target} is not in place (SGLang {version('sglang')})")


def _mismatch(seam: Seam, finding: str) -> str:
    return (
        f"{seam.symbol} {finding}; installed is SGLang {version('sglang')}, "
        f"tested with {TESTED_VERSION} (needed for: {seam.why})"
    )
