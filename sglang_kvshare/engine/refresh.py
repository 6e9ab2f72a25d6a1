"""The decode stage: prompt tokens recomputed as extra rows of a decode batch.

    decode batch    request 0 | request 1 | request 1 at position 40 | request 1 at position 57
    sequence length    n_0         n_1              41                         58
    KV written to     new slot    new slot      its own slot               its own slot
    logits            sampled     sampled        dropped                    dropped

Seams: ``ModelRunner.forward``, replaced on the instance for one decode batch that carries such
rows; ``ForwardContext.attn_backend``, on steps at which attention is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_kvshare.attention.attention_mass import attention_mass
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.engine.attention_stand_in import AttentionStandIn
from sglang_kvshare.engine.ranks import Ranks
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.plan import Int64Array
from sglang_kvshare.scheduling.refresh_pace import RefreshPace

#: Steps of a request between two looks at its attention.
LOOK_EVERY = 8
#: Layers whose attention is looked at, spread over the model.
LOOKS = 4


@dataclass(frozen=True)
class Refresh:
    """What one decode step does beside decoding.

    Attributes:
        requests: number in the batch of each extra row's request.
        positions: int64, position of each extra row.
        token_ids: of each extra row.
        looks: requests whose attention is looked at.
    """

    requests: Sequence[int]
    positions: Int64Array
    token_ids: Sequence[int]
    looks: Sequence[tuple[int, RequestState]]

    @property
    def rows(self) -> int:
        return len(self.requests)

    def note(self, batch: Any) -> None:
        """Count what was refreshed."""
        for number in self.requests:
            state = state_of(batch.reqs[number])
            if state is not None and not state.again:
                state.refreshed_tokens += 1


def refresh_of(batch: Any, pace: RefreshPace) -> Refresh | None:
    """Choose what this decode step refreshes; ``None`` when no request has anything queued."""
    waiting = []
    for number, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is not None and state.queue is not None and not state.queue.done:
            waiting.append((number, req, state))
    if not waiting:
        return None
    wanted = sum(
        min(state.options.refresh_tokens, len(state.queue or ())) for _, _, state in waiting
    )
    slos = [state.options.tbt_slo_ms for state in map(state_of, batch.reqs) if state is not None]
    tightest = min((slo for slo in slos if slo is not None), default=None)
    allowed = pace.allowance(len(batch.reqs), wanted, tightest)
    requests: list[int] = []
    positions: list[Int64Array] = []
    token_ids: list[int] = []
    # Where not all can have their rows, whoever has had least comes first.
    for number, req, state in sorted(waiting, key=lambda one: one[2].ridden):
        assert state.queue is not None
        taken = state.queue.take(min(state.options.refresh_tokens, allowed - len(requests)))
        state.ridden += len(taken)
        requests += [number] * len(taken)
        positions.append(taken)
        token_ids += [req.full_untruncated_fill_ids[p] for p in taken.tolist()]
    looks = []
    for number, _, state in waiting:
        state.decode_steps += 1
        if state.decode_steps % LOOK_EVERY == 0:
            looks.append((number, state))
    return Refresh(requests, np.concatenate(positions), token_ids, looks)


@contextmanager
def refreshing(
    runner: Any, refresh: Refresh, layers: int, ranks: Ranks | None = None
) -> Iterator[Callable[[], None]]:
    """Run the decode batch inside this context with the rows of ``refresh``.

    Args:
        ranks: those that hold the other heads.

    Yields:
        a function to be called after the step: lets the queues rank anew by what was seen.
    """
    tell: Callable[[], None] = _nothing
    with ExitStack() as stack:
        if refresh.rows:
            stock = runner.forward
            runner.forward = lambda forward_batch, *args, **kwargs: _cut(
                stock(_longer(runner, forward_batch, refresh), *args, **kwargs),
                forward_batch.batch_size,
            )
            stack.callback(delattr, runner, "forward")
        if refresh.looks:
            attention = WatchingAttention(runner.attn_backend, refresh.looks, layers, ranks)
            stack.enter_context(forward_context(ForwardContext(attn_backend=attention)))
            tell = attention.tell
        yield tell


def _nothing() -> None:
    """Nothing was looked at."""


def _longer(runner: Any, forward_batch: Any, refresh: Refresh) -> Any:
    """A copy of the batch with the extra rows behind the requests'."""
    device = forward_batch.out_cache_loc.device
    index, positions, ids = upload(
        device, list(refresh.requests), refresh.positions, list(refresh.token_ids)
    )
    rows = forward_batch.req_pool_indices.index_select(0, index)
    slots = runner.req_to_token_pool.req_to_token[rows, positions]
    lengths = positions + 1

    def joined(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.cat([old, new.to(old.device, old.dtype)])

    def repeated(values: Any) -> Any:
        return None if values is None else [*values, *(values[i] for i in refresh.requests)]

    return replace(
        forward_batch,
        batch_size=forward_batch.batch_size + refresh.rows,
        input_ids=joined(forward_batch.input_ids, ids),
        req_pool_indices=joined(forward_batch.req_pool_indices, rows),
        seq_lens=joined(forward_batch.seq_lens, lengths),
        seq_lens_cpu=joined(forward_batch.seq_lens_cpu, lengths),
        seq_lens_sum=int(forward_batch.seq_lens_sum) + int((refresh.positions + 1).sum()),
        orig_seq_lens=joined(forward_batch.orig_seq_lens, lengths),
        out_cache_loc=joined(forward_batch.out_cache_loc, slots),
        positions=joined(forward_batch.positions, positions),
        lora_ids=repeated(forward_batch.lora_ids),
        rids=repeated(forward_batch.rids),
    )


def _cut(out: Any, requests: int) -> Any:
    """Drop what the extra rows say."""
    logits = out.logits_output
    logits.next_token_logits = logits.next_token_logits[:requests]
    if logits.hidden_states is not None:
        logits.hidden_states = logits.hidden_states[:requests]
    return out


class WatchingAttention(AttentionStandIn):
    """The stock attention backend, and what some requests' new tokens attend to in some layers."""

    def __init__(
        self,
        stock: Any,
        looks: Sequence[tuple[int, RequestState]],
        layers: int,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(stock)
        self._ranks = ranks or Ranks()
        self._looks = looks
        # Never layer 0, whose attention says little of what a token means.
        self._layers = {layers * (i + 1) // (LOOKS + 1) for i in range(LOOKS)} - {0}
        self._mass: dict[int, torch.Tensor] = {}

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        out = self._stock.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if layer.layer_id in self._layers:
            queries, _ = self._by_head(q, layer)
            for number, _ in self._looks:
                length = int(forward_batch.seq_lens_cpu[number])
                (slots,) = self._reader.rows(forward_batch.req_pool_indices[[number]], [length])
                keys = self._reader.keys(layer, slots, torch.float32)
                last = torch.tensor([length - 1], device=q.device)
                mass = attention_mass(queries[number : number + 1], keys, last, scale=layer.scaling)
                self._mass[number] = mass + self._mass.get(number, 0)
        return out

    def tell(self) -> None:
        """Let the queues rank anew. Where a captured graph ran instead, nothing was seen."""
        for number, state in self._looks:
            if number in self._mass and state.queue is not None:
                mass = self._ranks.add_up(self._mass[number]).double().cpu().numpy()
                state.queue.look_again(mass[state.queue.positions])
