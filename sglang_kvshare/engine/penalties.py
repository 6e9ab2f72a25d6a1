"""What a resumed request has said still counts against it.

SGLang keeps the penalties of a batch (frequency, presence, repetition, ``min_new_tokens``) beside
its decoding, and makes them anew for a batch that prefills: a request that comes back from a
preemption starts from none, and goes on otherwise than it would have.

Seam: ``ScheduleBatch.prepare_for_extend``, which makes them; ``sampling.penaltylib``, whose tensors
are ``[requests of the batch, vocabulary]`` (``min_new_tokens``: a count a request).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

logger = logging.getLogger(__name__)


def prepare_for_extend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``ScheduleBatch.prepare_for_extend``."""
    result = original(self, *args, **kwargs)
    orchestrator = self.sampling_info.penalizer_orchestrator
    if orchestrator.is_required:
        try:
            count_again(orchestrator, [_counted(req, self.enable_overlap) for req in self.reqs])
        except Exception:
            logger.exception("KVShare could not count again what was said; SGLang counts anew")
            fault = getattr(self.tree_cache, "fault", None)
            if fault is not None:
                fault("penalties")
    return result


def _counted(req: Any, overlap: bool) -> Sequence[int]:
    """The tokens that had been counted when the request's next one would have been sampled.

    With overlap SGLang counts a token one step late, and the prompt's last one before the first::

        without     o0 o1 ... ok
        overlap  p  o0 o1 ...     (and ok at the next decode step)
    """
    said: Sequence[int] = req.output_ids
    return [req.origin_input_ids[-1], *said[:-1]] if overlap and said else said


def count_again(orchestrator: Any, said: Sequence[Sequence[int]]) -> None:
    """Feed whole outputs to penalizers that have counted nothing yet.

    Args:
        orchestrator: SGLang's ``BatchedPenalizerOrchestrator``.
        said: of each request of its batch, the token ids that count.
    """
    lengths = [len(ids) for ids in said]
    if not any(lengths):
        return
    device = orchestrator.device
    tokens = torch.tensor(list(chain.from_iterable(said)), dtype=torch.int64, device=device)
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    rows = torch.repeat_interleave(counts)
    for kind, penalizer in orchestrator.penalizers.items():
        if penalizer.is_prepared():
            _KINDS[kind.__name__](penalizer, rows, tokens, counts)


def _frequency(penalizer: Any, rows: Any, tokens: Any, counts: Any) -> None:
    each = penalizer.frequency_penalties[rows, 0]
    penalizer.cumulated_frequency_penalties.index_put_((rows, tokens), each, accumulate=True)


def _presence(penalizer: Any, rows: Any, tokens: Any, counts: Any) -> None:
    penalizer.cumulated_presence_penalties[rows, tokens] = penalizer.presence_penalties[rows, 0]


def _repetition(penalizer: Any, rows: Any, tokens: Any, counts: Any) -> None:
    each = penalizer.repetition_penalties[rows, 0]
    penalizer.cumulated_repetition_penalties[rows, tokens] = each


def _min_new_tokens(penalizer: Any, rows: Any, tokens: Any, counts: Any) -> None:
    penalizer.len_output_tokens += counts[:, None].to(penalizer.len_output_tokens.dtype)


_KINDS = {
    "BatchedFrequencyPenalizer": _frequency,
    "BatchedPresencePenalizer": _presence,
    "BatchedRepetitionPenalizer": _repetition,
    "BatchedMinNewTokensPenalizer": _min_new_tokens,
}
