"""Scores by hand and against slow references; divergences against whole distributions."""

from __future__ import annotations

import math
import re
import string
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshare_eval.metrics import all_scores, divergence, metric_names, score
from kvshare_eval.quality.tasks import METRICS

pytestmark = pytest.mark.unit

WORDS = st.lists(
    st.sampled_from(["the", "A", "an", "cat", "Cat,", "dog's", "1,200", "-", "sat", "é", "U.S."]),
    max_size=8,
).map(" ".join)


# --- references, as plain as can be ---------------------------------------------------------------


def normalised(text):
    """The steps of the official SQuAD script, one by one."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def plain_f1(answer, gold):
    a, g = normalised(answer), normalised(gold)
    if not a or not g:
        return float(a == g)
    same = sum((Counter(a) & Counter(g)).values())
    return 2 * same / (len(a) + len(g))


def plain_rouge_l(answer, gold):
    a, g = (re.findall("[a-z0-9]+", text.lower()) for text in (answer, gold))
    lengths = [[0] * (len(g) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(g):
            lengths[i + 1][j + 1] = (
                lengths[i][j] + 1 if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
            )
    common = lengths[-1][-1]
    return 2 * common / (len(a) + len(g)) if common else 0.0


@settings(max_examples=60, deadline=None)
@given(answer=WORDS, gold=st.lists(WORDS, min_size=1, max_size=3))
@example(answer="", gold=[""])
@example(answer="the", gold=["a"])
def test_scores_equal_the_references(answer, gold):
    assert score("f1", answer, gold) == pytest.approx(max(plain_f1(answer, g) for g in gold))
    exact = float(any(normalised(answer) == normalised(g) for g in gold))
    assert score("exact_match", answer, gold) == exact
    rouge = max(plain_rouge_l(answer, g) for g in gold)
    assert score("rouge_l", answer, gold) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("metric", "answer", "gold", "expected"),
    [
        ("f1", "the Eiffel Tower in Paris", ["Eiffel Tower"], 2 * 2 / (4 + 2)),
        ("f1", "Paris", ["Rome", "Paris, France"], 2 / 3),
        ("exact_match", "The Eiffel  tower.", ["eiffel tower"], 1),
        ("exact_match", "Eiffel tower, Paris", ["eiffel tower"], 0),
        ("rouge_l", "police kill the gunman", ["police killed the gunman"], 3 / 4),
        ("rouge_l", "gunman the kill police", ["police kill the gunman"], 1 / 4),
        ("contains", "It is the Eiffel Tower, in Paris.", ["eiffel tower"], 1),
        ("contains", "It is the tower of Eiffel.", ["eiffel tower"], 0),
        ("contains", "In 1976.", ["7"], 0),
        ("contains", "In 1976.", ["7", "1976"], 1),
        ("contains", "B", ["A"], 0),
        ("contains", "A", ["A"], 1),
        ("avoids", "B", ["A"], 1),
        ("avoids", "It is Octopus.", ["octopus"], 0),
        ("found_share", "8231, 77 and 12", ["8231", "12", "9"], 2 / 3),
        ("found_share", "none", ["8231", "12"], 0),
    ],
)
def test_scores_by_hand(metric, answer, gold, expected):
    assert score(metric, answer, gold) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("She pays $1,234.50 in all.", "1234.5", True),
        ("so 5 - 3 = 2", "2", True),
        ("That is -7.", "-7", True),
        ("That is −7 degrees", "-7", True),
        ("it is -7", "7", False),
        ("from 3-5", "5", True),
        ("It is 18.00", "#### 18", True),
        ("work\n#### 18\nQuestion: 3 + 4 = 7", "9 * 2 = 18\n#### 18", True),
        ("#### 17, though 18 was close", "18", False),
        ("#### unknown, maybe 18", "18", True),
        ("18 apples", "18", True),
        ("18 apples, not 20", "18", False),
        ("half: .5", "0.5", True),
        ("no number", "0", False),
        ("1,2", "2", True),
        ("$18", "18", True),
        ("-$18", "-18", True),
        ("12,345,678", "12345678", True),
    ],
)
def test_last_number(answer, gold, same):
    assert score("last_number", answer, [gold]) == same


def test_only_the_first_line_is_judged_where_a_task_says_so():
    answer = "\n Paris \nQuestion: another"
    assert score("exact_match", answer, ["paris"], first_line=True) == 1
    assert score("exact_match", answer, ["paris"], first_line=False) == 0
    assert score("exact_match", "", ["paris"], first_line=True) == 0


def test_all_scores_are_those_that_the_gold_allows():
    assert set(METRICS) <= set(metric_names())
    assert set(all_scores("x", ["12"])) == set(metric_names())
    assert set(all_scores("x", ["cat"])) == set(metric_names()) - {"last_number"}
    assert all_scores("x", []) == {}
    for name, value in all_scores("the 12 cats", ["12", "cats"], first_line=True).items():
        assert value == score(name, "the 12 cats", ["12", "cats"], first_line=True)


def test_what_cannot_be_judged_is_an_error():
    with pytest.raises(ValueError, match="allowed are f1, exact_match"):
        score("bleu", "a", ["a"])
    with pytest.raises(ValueError, match="at least one accepted answer"):
        score("f1", "a", [])
    with pytest.raises(ValueError, match="no number"):
        score("last_number", "1", ["cat"])


# --- divergence -----------------------------------------------------------------------------------


def whole_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def logs(probabilities):
    return {token: math.log(value) for token, value in enumerate(probabilities)}


@st.composite
def two_distributions(draw):
    size = draw(st.integers(2, 12))
    weights = st.lists(st.floats(1e-4, 1.0), min_size=size, max_size=size)
    pair = (draw(weights), draw(weights))
    return [[value / sum(one) for value in one] for one in pair]


def compare(p, q, keep):
    tokens = sorted(range(len(p)), key=lambda token: -p[token])[:keep]
    told = [{t: one[t] for t in tokens} for one in (logs(p), logs(q))]
    found = divergence(
        [told[0]],
        [logs(q)],
        full_top1=[p.index(max(p))],
        method_top1=[q.index(max(q))],
    )
    return found, tokens


@settings(max_examples=80, deadline=None)
@given(pair=two_distributions(), keep=st.integers(1, 12))
def test_divergence_is_a_lower_bound(pair, keep):
    p, q = pair
    found, tokens = compare(p, q, keep)
    true = whole_kl(p, q)
    assert 0 <= found.kl[0] <= true + 1e-6
    assert found.covered[0] == pytest.approx(sum(p[t] for t in tokens))
    assert found.top1 == (p.index(max(p)) == q.index(max(q)),)
    if keep >= len(p):
        assert found.kl[0] == pytest.approx(true, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(pair=two_distributions(), keep=st.integers(1, 12))
def test_divergence_of_equals_is_nothing(pair, keep):
    found, _ = compare(pair[0], pair[0], keep)
    assert found.kl == (0.0,)
    assert found.top1 == (True,)
    assert found.first_divergence is None


def test_divergence_by_hand():
    # Kept apart: 0.5 and 0.25, the rest is 0.25; for the method 0.25, 0.25 and 0.5.
    full = [{"a": math.log(0.5), "b": math.log(0.25)}] * 2
    method = [{"a": math.log(0.25), "b": math.log(0.25), "z": math.log(0.4)}] * 2
    found = divergence(full, method, full_top1=["a", "a"], method_top1=["a", "z"])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert found.kl == pytest.approx((expected, expected))
    assert found.mean_kl == pytest.approx(expected)
    assert found.top1 == (True, False)
    assert found.first_divergence == 1
    assert found.covered == pytest.approx((0.75, 0.75))


def test_divergence_stays_finite_where_one_side_is_certain():
    found = divergence([{1: 0.0}], [{1: -900.0}], full_top1=[1], method_top1=[2])
    assert 0 < found.kl[0] < math.inf
    assert found.covered == (1.0,)


def test_divergence_names_what_is_missing():
    with pytest.raises(ValueError, match="position 1: method tells no log-probability of 'b'"):
        divergence(
            [{"a": -1.0}, {"a": -1.0, "b": -2.0}],
            [{"a": -1.0}, {"a": -1.0}],
            full_top1=["a", "a"],
            method_top1=["a", "a"],
        )
    with pytest.raises(ValueError, match="full tells no token"):
        divergence([{}], [{}], full_top1=[0], method_top1=[0])
    with pytest.raises(ValueError, match="same number of positions"):
        divergence([], [], full_top1=[], method_top1=[])
