"""The labelled sets of the sketches: what counts as right, and what a gate lets through."""

from __future__ import annotations

import numpy as np
import pytest

from kvshare_eval.loaders import DataSource
from kvshare_eval.matching.sketches import Donors, Found, edited, measured
from sglang_kvshare.matching.sketch import Sketcher

pytestmark = pytest.mark.unit

VOCABULARY = 400


def sketcher():
    table = np.random.default_rng(0).standard_normal((VOCABULARY, 32)).astype(np.float32)
    return Sketcher(table, size_tokens=16, dims=32)


def texts(count, seed, length=40):
    random = np.random.default_rng(seed)
    return [(label, random.integers(0, VOCABULARY, length)) for label in range(count)]


def test_what_was_indexed_is_found_and_strangers_are_not_right():
    donors = texts(20, 0)
    indexed = Donors(sketcher(), donors)
    same = indexed.ask(donors)
    assert same.recall(1) == 1
    assert same.similarity == pytest.approx(1, abs=1e-4)
    strangers = indexed.ask([(label + 100, text) for label, text in texts(20, 1)])
    assert strangers.recall(5) == 0
    assert strangers.precision(0.0) == 0
    assert strangers.passing(0.95) == 0
    assert np.isnan(strangers.precision(0.95))


def test_none_finds_itself():
    ones = [(label // 2, text[:16]) for label, text in texts(10, 0)]
    alone = Donors(sketcher(), ones).ask_each_other()
    assert alone.similarity.max() < 0.99
    # Of several windows, none finds the others of its text.
    long = [(label, text) for label, text in texts(10, 0)]
    assert Donors(sketcher(), long).ask_each_other().recall(5) == 0
    twice = Donors(sketcher(), [*ones, *ones]).ask_each_other()
    assert twice.recall(1) == 1


def test_a_gate_splits_by_hand():
    found = Found(
        np.array([[True, False], [False, True], [False, False], [True, True]]),
        np.array([0.9, 0.7, 0.5, 0.4], dtype=np.float32),
    )
    assert found.recall(1) == 0.5
    assert found.recall(2) == 0.75
    assert found.passing(0.6) == 0.5
    assert found.precision(0.6) == 0.5
    assert found.precision(0.3) == 0.5
    assert found.precision(0.8) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_so_many_tokens_are_edited(share):
    text = np.arange(3000)
    changed = edited(text, share, np.random.default_rng(0))
    # Of three edits one drops a token, one replaces it, one keeps it behind another.
    expected = 1 - 2 * share / 3
    assert np.isin(text, changed).mean() >= expected - 0.05
    kept = (np.diff(np.flatnonzero(np.isin(changed, text))) >= 1).all()
    assert kept
    if share == 0:
        assert (changed == text).all()
    else:
        assert (changed[: len(text)] != text[: len(changed)]).any()


def test_the_sets_of_the_repository_are_measured():
    def ids(text):
        return np.array([hash_of(word) for word in text.split()], dtype=np.int64)

    def hash_of(word):
        return sum(ord(c) * 31**i for i, c in enumerate(word)) % VOCABULARY

    found, upkeep = measured(DataSource(), ids, sketcher(), 60)
    told = dict(found)
    assert told["passages, 0% edited"].recall(1) > 0.95
    assert {"passages, 30% edited", "intents"} <= set(told)
    strangers = told["passages, strangers"]
    assert len(strangers.right) > 0
    assert strangers.recall(5) == 0
    assert upkeep > 0
