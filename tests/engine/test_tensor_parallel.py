"""Two ranks, each with half of the heads: they plan alike and choose by what both have measured.

The reference knows nothing of ranks. Ranks that chose other rows would run batches of other
lengths, and hang in the next sum over ranks; what half of the heads would choose is asked as well.
"""

from __future__ import annotations

import pytest
import test_refresh
import test_storm
from comparing import largest_difference
from prompts import Book
from server_configs import on
from test_selection import SCORES, check_selection, made

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", SCORES)
@on("two_ranks")
def test_a_selection_is_that_of_all_heads(server, references, name):
    check_selection(server, references, name, 0.25)


@on("two_ranks")
def test_one_ranks_heads_would_choose_others(server, references):
    """The control: at the check layer, by the deviation of one rank's values alone."""
    _, case = made(server, references, 300, 0.25)
    whole, halves = case.value_l2(1), case.value_l2_of_heads(1)
    chosen = [set(dict(case.spared(scores))) for scores in (whole, *halves)]
    assert chosen[0] != chosen[1]
    assert chosen[0] != chosen[2]
    assert chosen[1] != chosen[2]


@pytest.mark.parametrize(("name", "count"), [("dhd", 3), ("query", 3), ("seams", 3)])
@on("two_ranks")
def test_ranks_refresh_the_same_rows(server, references, name, count):
    test_refresh.check_refreshed(server, references, name, count)


@on("two_ranks")
def test_ranks_look_at_the_attention_of_all_heads(server):
    """Long enough for several looks, after which the queue is ranked anew."""
    book = Book(431)
    donor, pieces = book.donor([90, 80])
    server.generate(donor, 1, logprobs=False)
    calls = [
        {
            "ids": book.prompt(pieces[::-1])[0],
            "n_new": 40,
            "recompute_ratio": 0.2,
            "selector": "dhd",
            "refresh_tokens": 2,
            "publish": False,
        }
        for _ in range(3)
    ]
    for answer in server.concurrently(calls):
        assert answer.report["reused_tokens"] > 0
        assert answer.report["refreshed_tokens"] > 30


@on("two_ranks_tight")
def test_a_storm_on_two_ranks_leaves_no_trace(server):
    """Donors that give way, retraction at every fifth step, swapping and aborts."""
    before = test_storm.probe(server)
    server.flush()
    finished, aborted = test_storm.storm(server, 72, test_storm.SECONDS, test_storm.ANY)
    server.assert_healthy()
    assert len(finished) > 5
    assert any(answer.report["reused_tokens"] for _, _, answer in finished)
    assert aborted
    test_storm.same(before, test_storm.probe(server))


@on("two_ranks_tight")
def test_exact_requests_stay_exact_on_two_ranks(server, references):
    reference = references[server.config.model]
    book = Book(432)
    donor, pieces = book.donor([50, 40])
    server.generate(donor, 1, logprobs=False)
    prompts = [book.prompt(pieces[::-1])[0] for _ in range(3)]
    answers = server.concurrently([{"ids": p, "n_new": 30, **test_storm.EXACT[0]} for p in prompts])
    assert sum(answer.meta["num_retractions"] for answer in answers) > 1
    for prompt, answer in zip(prompts, answers, strict=True):
        assert largest_difference(answer, reference, reference.full(prompt)) < 5e-4
