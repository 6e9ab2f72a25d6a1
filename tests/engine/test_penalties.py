"""Penalties of resumed requests, against SGLang's own penalizers fed one token at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

VOCAB = 23
SETTINGS = (
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.4},
    {"frequency_penalty": -0.5, "min_new_tokens": 4},
    {},
    {"repetition_penalty": 0.7, "min_new_tokens": 9},
)


def request(said, settings):
    from sglang.srt.sampling.sampling_params import SamplingParams

    return SimpleNamespace(
        output_ids=list(said),
        origin_input_ids=[7, 5],
        sampling_params=SamplingParams(**settings),
        eos_token_ids={1},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2),
    )


class Batch(SimpleNamespace):
    """Weakly referenced by the penalizers."""


def orchestrator(reqs):
    from sglang.srt.sampling import penaltylib

    batch = Batch(reqs=reqs, device="cpu")
    penalizers = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    return batch, penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, penalizers)


def counted_one_by_one(req, said):
    batch, own = orchestrator([req])
    for token in said:
        own.cumulate_output_tokens(torch.tensor([token]))
    return batch, own


def applied(own, logits):
    """What ``BatchedPenalizerOrchestrator.apply`` does, without compiling the scaling."""
    additive = torch.zeros_like(logits)
    own.accumulate_additive_penalties(additive)
    scaling = own.accumulate_scaling_penalties()
    return additive, torch.ones_like(logits) if scaling is None else scaling


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lengths", [(5, 9, 3, 8), (0, 4, 0, 0), (1, 1, 1, 1)])
def test_as_if_it_had_never_been_away(lengths, overlap):
    from sglang_kvshare.engine.penalties import prepare_for_extend

    rng = random.Random(str(lengths))
    reqs = [
        request([rng.randrange(VOCAB) for _ in range(length)], settings)
        for length, settings in zip(lengths, SETTINGS, strict=True)
    ]
    batch, fresh = orchestrator(reqs)
    batch.enable_overlap = overlap
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=fresh)
    untouched = applied(fresh, torch.zeros(len(reqs), VOCAB))
    assert prepare_for_extend(lambda self: "result", batch) == "result"
    additive, scaling = applied(fresh, torch.zeros(len(reqs), VOCAB))
    assert not torch.equal(additive, untouched[0]) or not torch.equal(scaling, untouched[1])
    for row, req in enumerate(reqs):
        said = req.output_ids
        if overlap and said:
            said = [req.origin_input_ids[-1], *said[:-1]]
        _batch, own = counted_one_by_one(req, said)
        expected = applied(own, torch.zeros(1, VOCAB))
        torch.testing.assert_close(additive[row : row + 1], expected[0])
        torch.testing.assert_close(scaling[row : row + 1], expected[1])


def test_new_requests_and_requests_without_penalties_are_left_alone():
    from sglang_kvshare.engine.penalties import prepare_for_extend

    for reqs in ([request([], SETTINGS[0])], [request([3, 3], {})]):
        batch, fresh = orchestrator(reqs)
        batch.enable_overlap = False
        batch.sampling_info = SimpleNamespace(penalizer_orchestrator=fresh)
        before = applied(fresh, torch.zeros(1, VOCAB))
        prepare_for_extend(lambda self: None, batch)
        for was, now in zip(before, applied(fresh, torch.zeros(1, VOCAB)), strict=True):
            assert torch.equal(was, now)


def test_a_fault_is_counted_and_the_batch_goes_on(monkeypatch):
    from sglang_kvshare.engine import penalties

    batch, fresh = orchestrator([request([3, 3], SETTINGS[0])])
    faults = []
    batch.enable_overlap, batch.tree_cache = False, SimpleNamespace(fault=faults.append)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=fresh)
    monkeypatch.setattr(penalties, "_KINDS", {})
    assert penalties.prepare_for_extend(lambda self: "result", batch) == "result"
    assert faults == ["penalties"]


def test_every_penalizer_that_sglang_makes_is_known():
    from sglang_kvshare.engine.penalties import _KINDS

    _batch, own = orchestrator([request([], {})])
    assert {kind.__name__ for kind in own.penalizers} == set(_KINDS)
