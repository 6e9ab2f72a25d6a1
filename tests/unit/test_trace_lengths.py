"""Estimates on a trace that is made up: they hold what they promise, first and next bounds."""

from __future__ import annotations

import numpy as np
import pytest

from kvshare_eval.loaders.traces import TraceRequest
from kvshare_eval.simulate.lengths import kept

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_promises_are_kept_though_answers_are_learnt_of_late(confidence):
    random = np.random.default_rng(3)
    arrivals = np.cumsum(random.exponential(0.2, 3000))
    lengths = np.clip(random.lognormal(5, 0.7, 3000), 1, 2048).astype(int)
    requests = [
        TraceRequest(float(when), int(random.integers(50, 4000)), int(tokens))
        for when, tokens in zip(arrivals, lengths, strict=True)
    ]
    told = kept(requests, confidence)
    assert told.first.answers > 2800
    assert told.first.observed == pytest.approx(confidence, abs=0.025)
    assert told.next_share == pytest.approx(confidence, abs=0.06)
    assert told.first.padding < 4
