"""What every selector chooses on a server, against the plain reference; and what that leads to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from comparing import difference, largest_difference, narrow_layer
from prompts import Book, cached_part
from server_configs import on
from slow_selection import Case

from sglang_kvshare.plan import ReusePlan, Span

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
CHECK = 1


def by(selector, attention="probe_pass"):
    return {"selector": selector, "attention": attention}


#: settings -> (scores, whether they need the check layer)
SCORES = {
    "query": (by("query"), lambda case: case.probe_attention(), False),
    "contribution": (by("contribution"), lambda case: case.contribution(), False),
    "dhd_relative": (
        by("dhd_relative"),
        lambda case: times(case.contribution(), case.relative(CHECK)),
        True,
    ),
    "dhd by probes": (
        by("dhd"),
        lambda case: times(case.probe_attention(), case.value_l1(CHECK)),
        True,
    ),
    "dhd at the check layer": (
        by("dhd", "check_layer"),
        lambda case: times(case.check_attention(CHECK), case.value_l1(CHECK)),
        True,
    ),
    "deviation": (by("deviation"), lambda case: case.value_l2(CHECK), True),
    "key_deviation": (by("key_deviation"), lambda case: case.key_l2(CHECK), True),
    "influence": (by("influence"), lambda case: case.influence(CHECK), True),
}


def times(one, other):
    return {p: one[p] * other[p] for p in one}


def made(server, references, seed, ratio, lengths=(50, 40, 60), order=(2, 0)):
    """A prompt of passages that a donor has left in the cache, and the slow view of it."""
    book = Book(seed)
    donor, pieces = book.donor(list(lengths))
    server.generate(donor, 1, logprobs=False)
    prompt, matches = book.prompt([pieces[i] for i in order])
    flag = server.config.flag
    case = Case(
        references[server.config.model],
        tuple(prompt),
        cached_part(matches, server.config.page_size),
        ratio,
        flag("--kvshare-seam-tokens", 8),
        flag("--kvshare-tail-tokens", 8),
    )
    return prompt, case


@pytest.mark.parametrize("ratio", [0.25, 0.5])
@pytest.mark.parametrize("name", SCORES)
@on("llama")
def test_a_selection_equals_its_slow_definition(server, references, name, ratio):
    check_selection(server, references, name, ratio)


@pytest.mark.parametrize("name", ["query", "dhd_relative", "dhd at the check layer"])
@on("glm4")
def test_a_prompt_that_stays_in_one_chunk_is_chosen_from_as_a_whole(server, references, name):
    """Chunks of 64, a prompt of 119 tokens; pages, dense layers, partial RoPE, sandwich norms."""
    check_selection(server, references, name, 0.25)


@pytest.mark.parametrize("name", ["query", "dhd at the check layer"])
@on("llama")
def test_fewer_rows_may_look(server, references, name):
    check_selection(server, references, name, 0.25, probe_tokens=3)


def check_selection(server, references, name, ratio, **further):
    settings, scores, checks = SCORES[name]
    prompt, case = made(server, references, 300, ratio)
    if further:
        case = replace(case, most_lookers=further["probe_tokens"])
    answer = server.generate(prompt, 8, recompute_ratio=ratio, publish=False, **settings, **further)
    spared = case.spared(scores(case))
    matched = len(case.placed)
    assert answer.counts == (0, len(spared), matched - len(spared), len(prompt) - matched)
    assert answer.report["selector"] == settings["selector"]
    layer = CHECK + 1 if checks else narrow_layer(server)
    # What it cost: layers before the choice run for all rows, and probe rows twice.
    dense, layers = CHECK if checks else narrow_layer(server), case.reference.model.layers
    kept = (dense * len(prompt) + (layers - dense) * (len(prompt) - len(spared))) / layers
    probing = ("query", "contribution", "dhd by probes", "dhd_relative")
    probes = case.probe_rows if name in probing else []
    probe_share = case.probe_layers.stop / case.reference.model.layers
    assert answer.report["computed_rows"] == pytest.approx(
        kept + len(probes) * probe_share, abs=0.06
    )
    row = case.reference.approximate(prompt, spared, layer)
    assert largest_difference(answer, case.reference, row) < ROUNDING
    # Positive control: another choice of as many tokens gives another result.
    other = dict(case.spared(dict.fromkeys(case.placed, 1.0)))
    assert len(other) == len(spared)
    assert other != spared
    different = case.reference.approximate(prompt, other, layer).logprobs()
    assert (different - row.logprobs()).abs().max() > 5 * ROUNDING


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("name", [*SCORES, "random", "all", "none"])
@on("llama")
def test_the_ends_of_the_ratio_mean_the_same_for_every_selector(server, references, name, ratio):
    settings = SCORES[name][0] if name in SCORES else by(name)
    end = {"all": 1.0, "none": 0.0}.get(name, ratio)
    prompt, case = made(server, references, 301, ratio)
    answer = server.generate(prompt, 8, recompute_ratio=ratio, publish=False, **settings)
    if end == 1:
        assert answer.report["reused_tokens"] == 0
        alone = server.generate(prompt, 8, reuse="off", publish=False)
        assert difference(answer, alone) < ROUNDING
    else:
        assert answer.report["recomputed_tokens"] == 0
        row = case.reference.approximate(prompt, case.placed, narrow_layer(server))
        assert largest_difference(answer, case.reference, row) < ROUNDING


@on("llama")
def test_several_check_layers_narrow_gradually(server, references):
    prompt, case = made(server, references, 302, 0.25)
    settings = by("deviation") | {"check_layers": "1,2", "recompute_ratio": 0.25, "publish": False}
    answer = server.generate(prompt, 8, **settings)
    assert answer.report["reused_tokens"] + answer.report["recomputed_tokens"] == len(case.placed)
    expected = max(len(case.forced), -(-len(case.placed) // 4))
    assert answer.report["recomputed_tokens"] == expected
    once = server.generate(prompt, 8, **settings | {"check_layers": "2"})
    assert once.report["recomputed_tokens"] == expected
    # Layer 2 of some tokens only: what is chosen there, and what it costs, is another thing.
    assert difference_or_tokens(answer, once) > 0


def difference_or_tokens(one, other):
    return 1.0 if one.ids != other.ids else difference(one, other)


@on("llama")
def test_a_span_that_is_too_far_off_is_computed_in_full(server, references):
    prompt, case = made(server, references, 303, 0.1)
    settings = by("dhd") | {"recompute_ratio": 0.1, "publish": False}
    answer = server.generate(prompt, 8, max_deviation=0, **settings)
    assert answer.counts == (0, 0, len(case.placed), len(prompt) - len(case.placed))
    assert (answer.report["decision"], answer.report["reason"]) == ("none", "deviation")
    alone = server.generate(prompt, 8, reuse="off", publish=False)
    assert difference(answer, alone) < ROUNDING
    # Positive control: what is not over the limit is reused.
    shares = []
    for match in case.matches:
        inside = range(match.start, match.start + match.length)
        off = sum(case.value_l1(CHECK)[p] for p in inside)
        size = sum(float(case.fresh(CHECK, p)[1].abs().sum()) for p in inside)
        shares.append(off / size)
    limit = sum(shares) / len(shares)
    answer = server.generate(prompt, 8, max_deviation=limit, **settings)
    kept = [m for m, share in zip(case.matches, shares, strict=True) if share <= limit]
    assert 0 < len(kept) < len(case.matches)
    assert 0 < answer.report["reused_tokens"] <= sum(m.length for m in kept)
    assert answer.report["decision"] == "reuse"


@on("llama")
def test_an_error_target_recomputes_what_it_takes_and_no_more(server, references):
    counts = []
    for error in (0.8, 0.4, 0.1):
        prompt, case = made(server, references, 304, 0.5)
        answer = server.generate(
            prompt, 8, recompute_error=error, publish=False, recompute_ratio=0, **by("query")
        )
        scores = case.probe_attention()
        left = sorted((scores[p] for p in case.placed if p not in case.forced), reverse=True)
        total, fewest = sum(scores.values()), 0
        while sum(left[fewest:]) > error * total:
            fewest += 1
        assert answer.report["recomputed_tokens"] == len(case.forced) + fewest
        counts.append(fewest)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@on("llama")
def test_a_batch_gives_what_single_requests_give(server, references):
    """Different selectors and ratios in one batch; every request narrows where it chose.

    Where prompts are cut into chunks, what shares a chunk decides who stays in one piece.
    """
    calls = []
    for number, name in enumerate(SCORES):
        for ratio in (0.1, 0.4):
            prompt, _ = made(server, references, 310 + number, ratio)
            calls.append(
                {"ids": prompt, "n_new": 4, "recompute_ratio": ratio, "publish": False}
                | SCORES[name][0]
            )
    alone = [server.generate(**call) for call in calls]
    together = server.concurrently(calls)
    for one, other in zip(alone, together, strict=True):
        assert one.counts == other.counts
        assert difference(one, other) < ROUNDING


@pytest.mark.parametrize(
    ("off", "size", "limit", "marked"),
    [
        (0.3, 1.0, 0.2, True),
        (0.1, 1.0, 0.2, False),
        (9.0, 1.0, float("inf"), False),
        (0.0, 0.0, float("inf"), False),
        (0.0, 0.0, 0.0, False),
        (float("nan"), 1.0, float("inf"), True),
        (0.0, float("nan"), float("inf"), True),
    ],
)
def test_what_is_over_the_limit(sglang_cpu, off, size, limit, marked):
    """Not a number is, whatever the limit; values of no size at all are not."""
    from sglang_kvshare.engine.row_program import _Measured
    from sglang_kvshare.recompute.selectors import Signals

    plan = ReusePlan(9, 0, (Span(0, 0, np.arange(2)), Span(4, 4, np.arange(2))))
    signals = Signals(
        value_l1=np.array([off, off, 0.0, 0.0]), value_size=np.array([size, size, 1.0, 1.0])
    )
    measured = _Measured(signals, np.ones(4, dtype=np.bool_))
    assert measured.over_limit(plan, limit).tolist() == [marked, marked, False, False]
