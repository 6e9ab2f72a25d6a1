"""The probe pass: the prompt's last rows alone, over the placed values, to see what they look at.

    layer        0 ........ half ............... five sixths ..... last
    probes run   ------------|--------------------->|
    counted                  |######################|

    prompt   |- prefix -|== placed ==|- new -|== placed ==|- new: last rows -|
    keys     |##########|############|       |############|##################|
    rows                                                  |      probes      |

New tokens before the last span have no keys yet, and are not looked at. What the probes write to
the pool is overwritten by the forward that follows. A forward that has shown all that counts is
left by an exception: the layers above, the output layer among them, would show nothing more.

Seams: ``ForwardBatch.init_new`` and ``ModelRunner.forward`` with a copy of the ``ScheduleBatch``
that holds other rows, as SGLang's own ``encoder_swa_replay`` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_kvshare.attention.attention_mass import attend_and_weigh
from sglang_kvshare.attention.position_mask import attend, last_positions
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.engine.attention_stand_in import AttentionStandIn
from sglang_kvshare.engine.ranks import Ranks
from sglang_kvshare.engine.row_program import Chunk
from sglang_kvshare.plan import Int64Array


@dataclass(frozen=True)
class Probes:
    """The probe rows of one request.

    Attributes:
        request: its number in the batch.
        rows: int64, positions of the probe rows, consecutive.
        seen: int64, ascending positions that have a key: what the probes look at.
    """

    request: int
    rows: Int64Array
    seen: Int64Array


def probes_of(chunk: Chunk) -> Probes:
    """The rows behind the last span, or the prompt's tail where a span reaches into it; up to the
    first row whose logits are asked for."""
    plan, choice = chunk.plan, chunk.choice
    assert plan is not None
    assert choice is not None
    end = plan.scored_from + 1
    tail = end - max(1, choice.settings.tail_tokens)
    start = max(min(plan.spans[-1].end, tail), end - choice.probe_tokens, chunk.start)
    rows = np.arange(start, end, dtype=np.int64)
    cached = np.arange(chunk.start, dtype=np.int64)
    placed = chunk.placement.positions
    return Probes(chunk.request, rows, np.concatenate([cached, placed[placed < start], rows]))


@dataclass(frozen=True)
class Seen:
    """What the probes saw of each key, float64 ``[keys]``, summed over rows and the layers that
    count.

    Attributes:
        attention: mean over heads of the attention that it received.
        contribution: the same, each layer and key head times the L1 norm of the donor's value.
    """

    attention: np.ndarray
    contribution: np.ndarray


def run_probes(
    runner: Any,
    batch: Any,
    probes: Sequence[Probes],
    layers: range,
    ranks: Ranks | None = None,
) -> list[Seen]:
    """Run the rows of ``probes``, and end with the last of ``layers``, which are those that count.

    Returns:
        for each of ``probes`` what it saw of ``seen``.
    """
    attention = ProbeAttention(runner.attn_backend, probes, layers)
    forward_batch = ForwardBatch.init_new(
        _batch_of(batch, probes, runner),
        runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    positions = np.concatenate([part.rows for part in probes])
    (forward_batch.positions,) = upload(batch.out_cache_loc.device, positions)
    with forward_context(ForwardContext(attn_backend=attention)), suppress(_Told):
        runner.forward(forward_batch)
    # The forward that follows is the one that tells the scheduler when shared memory is read.
    runner.shared_read_done_event = None
    # Of the heads of all ranks; one copy to the host for all requests.
    told = (ranks or Ranks()).add_up(torch.cat(attention.told, dim=1)).double().cpu().numpy()
    ends = np.cumsum([len(part.seen) for part in probes])[:-1]
    return [Seen(*part) for part in np.split(told, ends, axis=1)]


def _batch_of(batch: Any, probes: Sequence[Probes], runner: Any) -> Any:
    index = [part.request for part in probes]
    counts = [len(part.rows) for part in probes]
    ends = [int(part.rows[-1]) + 1 for part in probes]
    device = batch.out_cache_loc.device
    reqs = [batch.reqs[number] for number in index]
    slots = batch.req_pool_indices[index]
    table = runner.req_to_token_pool.req_to_token
    made = copy(batch)
    made.reqs = reqs
    made.input_ids = torch.tensor(
        [
            token
            for req, part in zip(reqs, probes, strict=True)
            for token in req.full_untruncated_fill_ids[part.rows[0] : part.rows[-1] + 1]
        ],
        dtype=torch.int64,
        device=device,
    )
    made.prefill_input_ids_cpu = None
    made.req_pool_indices = slots
    made.req_pool_indices_cpu = batch.req_pool_indices_cpu[index]
    made.prefix_lens = [end - count for end, count in zip(ends, counts, strict=True)]
    made.extend_lens = counts
    made.extend_num_tokens = sum(counts)
    made.seq_lens = torch.tensor(ends, dtype=torch.int64, device=device)
    made.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    made.seq_lens_sum = sum(ends)
    made.orig_seq_lens = made.seq_lens
    made.out_cache_loc = torch.cat(
        [table[slots[k], part.rows[0] : part.rows[-1] + 1] for k, part in enumerate(probes)]
    ).long()
    made.return_logprob = False
    made.top_logprobs_nums = None
    made.token_ids_logprobs = None
    made.extend_logprob_start_lens = counts
    made.extend_input_logprob_token_ids = None
    made.is_prefill_only = True
    made.spec_info = None
    made.sampling_info = None
    made.has_grammar = False
    made.multimodal_inputs = [None] * len(reqs)
    made.decoding_reqs = None
    return made


class _Told(Exception):
    """The probes have shown all that counts."""


class ProbeAttention(AttentionStandIn):
    """An attention backend for the probe pass."""

    def __init__(self, stock: Any, probes: Sequence[Probes], layers: range) -> None:
        super().__init__(stock)
        self._probes = probes
        self._layers = layers
        self._slots: list[torch.Tensor] | None = None
        # Where each row is among the keys that there are.
        self._ranks = [torch.from_numpy(np.searchsorted(part.seen, part.rows)) for part in probes]
        self._block_ends = [last_positions(ranks) for ranks in self._ranks]
        #: Attention and contribution, fp32 ``[2, keys]``.
        self.told = [torch.zeros(2, len(part.seen), dtype=torch.float32) for part in probes]

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
        """See ``AttentionBackend.forward``.

        Raises:
            _Told: in the last layer that counts.
        """
        if self._slots is None:
            ends = [int(part.rows[-1]) + 1 for part in self._probes]
            rows = self._reader.rows(forward_batch.req_pool_indices, ends)
            self._slots = [
                slots.index_select(0, torch.from_numpy(part.seen).to(slots.device))
                for slots, part in zip(rows, self._probes, strict=True)
            ]
            self._ranks = [ranks.to(q.device) for ranks in self._ranks]
            self.told = [told.to(q.device) for told in self.told]
        self._write(layer, forward_batch, k, v)
        queries, out = self._by_head(q, layer)
        begin = 0
        for number, (slots, ranks) in enumerate(zip(self._slots, self._ranks, strict=True)):
            part = slice(begin, begin + len(ranks))
            keys = self._reader.keys(layer, slots, q.dtype)
            values = self._reader.values(layer, slots, q.dtype)
            if layer.layer_id in self._layers:
                out[part], mass = attend_and_weigh(
                    queries[part], keys, values, ranks, scale=layer.scaling
                )
                size = torch.linalg.vector_norm(values, 1, dim=2, dtype=torch.float32).T
                self.told[number] += torch.stack([mass.sum(0), (mass * size).sum(0)])
            else:
                out[part] = attend(
                    queries[part],
                    keys,
                    values,
                    ranks,
                    scale=layer.scaling,
                    block_ends=self._block_ends[number],
                )
            begin = part.stop
        if layer.layer_id == self._layers[-1]:
            raise _Told
        return out.view(q.shape[0], -1)
