"""Time to the first token of one prompt, in full and narrowed, on a model of random weights.

From the call to the token on the host: donors copied, rows chosen, forward, one number back. What a
server does around it (matching, scheduling, sampling, the network) is not in it.

A narrowed prefill is judged by the share of the layers' rows that it computes: were each row as
cheap as one of the prefill in full, it would take that share of the full time.

    efficiency = (full * share) / narrowed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from kvshare_eval.device.causal_attention import FUSED, causal
from kvshare_eval.device.flashinfer_setup import MakeWrapper, adapter
from kvshare_eval.device.floors import Work
from kvshare_eval.device.kv_pool import KVPool, PoolBackend
from kvshare_eval.device.model_shapes import ModelShape
from kvshare_eval.device.model_weights import ModelWeights
from kvshare_eval.device.prompts import PASSAGE_TOKENS, ReusedPrompt, needed_tokens, reused_prompt
from kvshare_eval.device.reusing import CHECK_LAYER, Reuse
from kvshare_eval.device.runner import Prefilled, Runner
from kvshare_eval.device.timings import Spread, device_ms, waiting_ms

#: Recomputes seams alone: above 0, and below the share that a seam is.
SEAMS_ONLY = 1e-6
RATIOS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Way:
    """How a prompt is prefilled; ``ratio`` is ``None`` for in full."""

    ratio: float | None = None
    check_layer: int | None = None

    @property
    def name(self) -> str:
        if self.ratio is None:
            return "full"
        if self.ratio == SEAMS_ONLY:
            return "seams only"
        where = "before layer 0" if self.check_layer is None else f"check layer {self.check_layer}"
        return f"{100 * self.ratio:.0f} %, {where}"


#: Those that goals are set for come first.
WAYS = (
    Way(),
    Way(SEAMS_ONLY),
    Way(0.1, CHECK_LAYER),
    *(Way(ratio, CHECK_LAYER) for ratio in RATIOS if ratio != 0.1),
    *(Way(ratio) for ratio in RATIOS),
)


@dataclass(frozen=True)
class FirstToken:
    """
    Attributes:
        prompt_tokens: of which 95 % were matched.
        share: of the rows of all layers that were computed; see :func:`computed_share`.
        work: of the forward and of the copies.
        finite: whether donors' values were, and the logits.
    """

    model: str
    prompt_tokens: int
    way: Way
    time: Spread
    share: float
    work: Work
    finite: bool


class FirstTokens:
    """One model on a device, and the pool that its prompts are prefilled in.

    Args:
        most_tokens: of the longest prompt.
    """

    def __init__(
        self,
        weights: ModelWeights,
        most_tokens: int,
        make: MakeWrapper | None,
        *,
        passage_tokens: int = PASSAGE_TOKENS,
        kernel: SDPBackend | None = None,
    ) -> None:
        self.shape = weights.shape
        self._weights, self._passage = weights, passage_tokens
        self._device = weights.device.type
        self._pool = KVPool(
            self.shape, needed_tokens(most_tokens), weights.dtype, self._device, seed=9
        )
        self._naive = Runner(weights, self._pool, 2 * most_tokens, None, kernel)
        self._runner = self._naive
        if make is not None:
            rows = adapter(make, PoolBackend.of(self._pool))
            self._runner = Runner(weights, self._pool, 2 * most_tokens, rows, kernel)

    def prompt(self, prompt_tokens: int) -> ReusedPrompt:
        """A prompt whose donor is in the pool; those before it are gone."""
        self._pool.clear()
        made = reused_prompt(
            self._pool, self.shape.vocabulary, prompt_tokens, passage_tokens=self._passage
        )
        self._runner.prefill(made.donor_tokens, made.donor_slots)
        return made

    def time(self, prompt: ReusedPrompt, way: Way, runs: int, *, naive: bool = False) -> FirstToken:
        """
        Args:
            naive: narrowed rows attend in PyTorch, whatever is there.
        """
        runner = self._naive if naive else self._runner
        reuse = None
        if way.ratio is not None:
            reuse = Reuse(prompt.plan, way.ratio, way.check_layer)

        def first() -> Prefilled:
            told = runner.prefill(prompt.tokens, prompt.slots, reuse)
            # What a server would send on.
            told.logits.argmax().item()
            return told

        spread, told = waiting_ms(first, self._device, warm_up=2, runs=runs)
        count = len(prompt.tokens)
        return FirstToken(
            self.shape.name,
            count,
            way,
            spread,
            computed_share(self.shape, told, count),
            work_of(self.shape, told, count, self._copied(prompt, told, way), self._weights.dtype),
            bool(told.finite and torch.isfinite(told.logits).all()),
        )

    @staticmethod
    def _copied(prompt: ReusedPrompt, told: Prefilled, way: Way) -> int:
        """Tokens whose donors' values were copied: before a check layer nobody knows which."""
        if told.recompute is None:
            return 0
        recomputed = int(told.recompute.sum()) if way.check_layer is None else 0
        return prompt.plan.matched_tokens - recomputed


def needed_bytes(shape: ModelShape, most_tokens: int, itemsize: int) -> int:
    """Of device memory: weights, pool, FlashInfer's workspace, and a layer's activations."""
    weights = (shape.parameters + shape.hidden * shape.vocabulary) * itemsize
    pool = needed_tokens(most_tokens) * shape.layers * shape.token_bytes(itemsize)
    wide = 2 * shape.intermediate + 4 * (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    return weights + pool + most_tokens * (2 * wide + 8 * shape.hidden) * itemsize + (1 << 30)


def computed_share(shape: ModelShape, told: Prefilled, prompt_tokens: int) -> float:
    """Of the rows of all layers. Where a check layer computes queries, keys and values of more rows
    than go on, each part counts by its share of a layer's weights."""
    first = shape.qkv_parameters / (shape.qkv_parameters + shape.other_parameters)
    rows = [
        first * into + (1 - first) * out
        for into, out in zip(told.rows_in, told.rows_out, strict=True)
    ]
    return sum(rows) / (shape.layers * prompt_tokens)


def work_of(
    shape: ModelShape, told: Prefilled, prompt_tokens: int, copied: int, dtype: torch.dtype
) -> Work:
    """Products of all layers and the output of one row; weights once, each layer's keys and values
    once, and the donors' read and written."""
    pairs_of_all = prompt_tokens * (prompt_tokens + 1) // 2
    pairs_of_left = int((told.positions + 1).sum())
    operations = 2 * shape.hidden * shape.vocabulary
    for into, out in zip(told.rows_in, told.rows_out, strict=True):
        operations += 2 * (into * shape.qkv_parameters + out * shape.other_parameters)
        pairs = pairs_of_all if out == prompt_tokens else pairs_of_left
        operations += pairs * shape.pair_operations
    moved = shape.parameters * dtype.itemsize
    layer_bytes = shape.token_bytes(dtype.itemsize)
    moved += shape.layers * prompt_tokens * layer_bytes
    moved += 2 * shape.layers * copied * layer_bytes
    return Work(operations, moved)


def quickest_kernel(shape: ModelShape, tokens: int) -> tuple[SDPBackend, str]:
    """PyTorch's fastest causal kernel on this device, that what is compared with is no straw man.

    Raises:
        RuntimeError: none of them runs.
    """
    heads = [
        torch.randn(tokens, count, shape.head_dim, device="cuda").bfloat16()
        for count in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    ]
    times = dict(_kernel_times(heads, shape.scale))
    if not times:
        raise RuntimeError("no fused causal kernel of PyTorch runs here")
    best = min(times, key=lambda kernel: times[kernel].median_ms)
    told = ", ".join(f"{kernel.name} {spread} ms" for kernel, spread in times.items())
    return best, told


def _kernel_times(heads: list[torch.Tensor], scale: float) -> Iterator[tuple[SDPBackend, Spread]]:
    for kernel in FUSED:
        try:
            yield (
                kernel,
                device_ms(
                    lambda kernel=kernel: causal(*heads, scale=scale, kernel=kernel),
                    "cuda",
                    runs=7,
                ),
            )
        except RuntimeError:
            # Not on this device, or not with grouped heads.
            continue
