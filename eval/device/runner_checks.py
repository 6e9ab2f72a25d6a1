"""The model runner, in full and narrowed, on the device against the same weights in fp32 on a CPU.

Rows to recompute are compared too: near the limit of the ratio a few may change with the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvshare_eval.device.checks import Check, Pending
from kvshare_eval.device.flashinfer_setup import MakeWrapper, adapter
from kvshare_eval.device.kv_pool import KVPool, PoolBackend
from kvshare_eval.device.model_shapes import SMALL, TINY, ModelShape
from kvshare_eval.device.model_weights import ModelWeights, converted, random_weights, weights_of
from kvshare_eval.device.prompts import needed_tokens, reused_prompt
from kvshare_eval.device.reusing import Reuse
from kvshare_eval.device.runner import Prefilled, Runner

_PROMPT, _PASSAGE = 640, 128
#: Without a check layer, and with one.
_WAYS = (("in full", None), ("seams", (1e-6, None)), ("check layer, 10 %", (0.1, 1)))


def runner_checks(device: str, make: MakeWrapper | None) -> Iterator[Pending]:
    yield "runner in full, against transformers", _against_transformers
    for name, way in _WAYS:
        title = f"runner {name}, against fp32 on a CPU"
        yield title, partial(_on_device, title, device, make, way)


def _against_transformers() -> Check:
    """In fp32 on a CPU, where it is exact; elsewhere kernels differ."""
    name = "runner in full, against transformers"
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        return Check(name, 0.0, 0.0, f"left out: {error}")
    shape = TINY
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(shape.vocabulary, (97,))
    with torch.inference_mode():
        wanted = model(tokens[None]).logits[0, -1]
    weights = weights_of(shape, {name: x.detach() for name, x in model.state_dict().items()})
    pool = KVPool(shape, 97, torch.float32, "cpu")
    found = Runner(weights, pool, 97).prefill(tokens, pool.take(97)).logits
    return Check(name, float((found - wanted).abs().max()), 1e-4, "fp32, on the host")


def _on_device(
    name: str, device: str, make: MakeWrapper | None, way: tuple[float, int | None] | None
) -> Check:
    shape: ModelShape = SMALL if device == "cuda" else TINY
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = random_weights(shape, dtype, device, seed=7)
    found = _prefilled(weights, make if device == "cuda" else None, way)
    wanted = _prefilled(converted(weights, torch.float32, "cpu"), None, way)
    logits = found.logits.cpu()
    error = float((logits - wanted.logits).norm() / wanted.logits.norm())
    beside = f"{len(found.positions)} rows left"
    if found.recompute is not None and wanted.recompute is not None:
        other = int((found.recompute != wanted.recompute).sum())
        beside += f", {other} chosen otherwise"
        if other > 0.1 * max(1, int(wanted.recompute.sum())) or not found.finite:
            return Check(name, float("inf"), 0.0, beside)
    # Some layers of bf16, with some other rows.
    return Check(name, error, 0.1 if dtype == torch.bfloat16 else 1e-4, beside)


def _prefilled(
    weights: ModelWeights, make: MakeWrapper | None, way: tuple[float, int | None] | None
) -> Prefilled:
    shape, device = weights.shape, str(weights.device)
    pool = KVPool(shape, needed_tokens(_PROMPT), weights.dtype, device, seed=8)
    rows = None if make is None else adapter(make, PoolBackend.of(pool))
    runner = Runner(weights, pool, 2 * _PROMPT, rows)
    prompt = reused_prompt(pool, shape.vocabulary, _PROMPT, passage_tokens=_PASSAGE)
    runner.prefill(prompt.donor_tokens, prompt.donor_slots)
    reuse = None if way is None else Reuse(prompt.plan, way[0], way[1])
    return runner.prefill(prompt.tokens, prompt.slots, reuse)
