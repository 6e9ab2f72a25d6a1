"""What the server computes under reuse, against no reuse and against the reference.

Causality rests on these tests: the server equals a reference in which a row sees the keys up to its
own position and nothing else. (The key and value rows of a running server cannot be read, and
prompt log-probabilities switch reuse off; the attention alone is tested among the unit tests.)
"""

from __future__ import annotations

import pytest
from comparing import difference, expected_spared, largest_difference, narrow_layer
from prompts import Book, cached_part
from reference import Match
from server_configs import ALL, on

pytestmark = pytest.mark.engine

#: fp32, random weights: sums in another order.
ROUNDING = 1e-4


def donors(server, book, count=2, lengths=(90, 50, 70)):
    """Serve donors; the pieces that lie in cached pages."""
    pieces = []
    for _ in range(count):
        donor, found = book.donor(list(lengths))
        server.generate(donor, 1, logprobs=False)
        pieces += found
    return pieces


@on(*ALL)
def test_ratio_one_equals_no_reuse(server):
    book = Book(11)
    pieces = donors(server, book)
    orders = [(4, 0, 3), (1, 5), (2, 4, 1, 0)]
    prompts = [book.prompt([pieces[i] for i in order])[0] for order in orders]
    reused = [server.generate(prompt, recompute_ratio=1.0) for prompt in prompts]
    for answer in reused:
        assert answer.report["decision"] == "reuse"
        assert answer.report["recomputed_tokens"] > 50
        assert answer.report["reused_tokens"] == 0
    server.flush()
    for prompt, answer in zip(prompts, reused, strict=True):
        alone = server.generate(prompt, reuse="off")
        assert alone.counts == (0, 0, 0, len(prompt))
        assert difference(answer, alone) < ROUNDING


@pytest.mark.parametrize("ratio", [0, None, 0.5, 1.0])
@on(*ALL)
def test_an_approximation_equals_the_reference_s_approximation(server, references, ratio):
    reference = references[server.config.model]
    book = Book(12)
    pieces = donors(server, book)
    # Out of order, two donors, one passage twice, and one cut out of a passage's middle.
    middle = type(pieces[0])(pieces[0].donor, pieces[0].source + 20, 40)
    prompt, matches = book.prompt([pieces[5], pieces[1], middle, pieces[5]])
    matches = cached_part(matches, server.config.page_size)
    settings = {} if ratio is None else {"recompute_ratio": ratio}
    answer = server.generate(prompt, 8, **settings)
    spared = expected_spared(server, matches, len(prompt), ratio)
    matched = sum(match.length for match in matches)
    assert answer.counts == (0, len(spared), matched - len(spared), len(prompt) - matched)
    if ratio == 0:
        assert answer.report["recomputed_tokens"] == 0
        assert answer.report["reused_tokens"] == matched > 100
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING
    if spared:
        # Not just close to the full result: the approximation is another one.
        full = reference.full(prompt).logprobs()
        assert (row.logprobs() - full).abs().max() > 0.02


#: Tokens of a passage that are left as they are, with one replaced between each two parts.
PARTS = (20, 7, 5, 3, 18, 6, 4, 20)


@pytest.mark.parametrize("ratio", [None, 0.3])
@on(*ALL)
def test_an_edited_passage_is_reused_around_its_edits(server, references, ratio):
    """Runs, what lies between them, and beyond; a seam stands where the first one begins alone."""
    reference = references[server.config.model]
    book = Book(15)
    passage = donors(server, book, 1)[0]
    assert sum(PARTS) + len(PARTS) - 1 == passage.length
    prompt, source, matches = [941, 942], passage.source, []
    for part in PARTS:
        if part >= 4:
            matches.append(Match(len(prompt), source, part, passage.donor))
        prompt += passage.donor[source : source + part]
        prompt.append(950)
        source += part + 1
    prompt += [943, 944, 945]
    matches = cached_part(matches, server.config.page_size, min_run=4)
    answer = server.generate(prompt, 8, **({} if ratio is None else {"recompute_ratio": ratio}))
    spared = expected_spared(server, matches, len(prompt), ratio)
    matched = sum(match.length for match in matches)
    assert answer.counts == (0, len(spared), matched - len(spared), len(prompt) - matched)
    # One seam and some of each span: with a seam at every span little would be left.
    assert len(spared) > (0.6 if ratio is None else 0.5) * matched
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING


@on("qwen3", "mistral", "linear_rope")
def test_a_span_behind_an_exact_prefix(server, references):
    """A prefix in whole pages, then reuse; the prefix is exact and stays so."""
    reference = references[server.config.model]
    book = Book(13)
    page = server.config.page_size
    base, _ = book.donor([100, 80, 60])
    server.generate(base, 1, logprobs=False)
    other = donors(server, book)
    tail, matches = book.prompt([other[0], other[4]])
    prompt = [*base[: 2 * page], *tail]
    matches = [
        type(m)(m.start + 2 * page, m.source, m.length, m.donor) for m in cached_part(matches, page)
    ]
    answer = server.generate(prompt, 8, recompute_ratio=0)
    assert answer.report["prefix_tokens"] == 2 * page
    spared = expected_spared(server, matches, len(prompt), 0)
    assert answer.report["reused_tokens"] == len(spared) > 60
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING


@on("mistral", "linear_rope")
def test_a_donor_with_the_very_same_context_is_exact(server):
    """Two prompts share 100 tokens: with pages of 64 the prefix ends at 64, and the tokens after
    it lie in a page that differs only behind them. Reused there, they are exact."""
    book = Book(14)
    shared = book.passage(100)
    server.generate([*shared, *book.passage(60)], 1, logprobs=False)
    prompt = [*shared, *book.passage(30)]
    answer = server.generate(prompt, recompute_ratio=0)
    assert answer.counts == (64, 36, 0, 30)
    server.flush()
    assert difference(answer, server.generate(prompt, reuse="off")) < ROUNDING


@on("mistral", "qwen2")
def test_a_chunk_that_is_spared_as_a_whole(server, references):
    """Chunks of 64 and a passage of 250: some chunks hold no row that has to run."""
    reference = references[server.config.model]
    book = Book(15)
    pieces = donors(server, book, count=1, lengths=(250, 64))
    prompt, matches = book.prompt([pieces[0]])
    answer = server.generate(prompt, 8, recompute_ratio=0)
    matches = cached_part(matches, server.config.page_size)
    spared = expected_spared(server, matches, len(prompt), 0)
    assert answer.report["reused_tokens"] == len(spared) == 250
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING


@on(*ALL)
def test_the_same_prompt_twice(server, references):
    reference = references[server.config.model]
    prompt, _ = Book(16).donor([100, 80])
    first = server.generate(prompt)
    again = server.generate(prompt)
    page = server.config.page_size
    prefix = (len(prompt) - 1) // page * page
    assert first.counts == (0, 0, 0, len(prompt))
    assert again.report["prefix_tokens"] == prefix
    assert difference(first, again) < ROUNDING
    assert largest_difference(again, reference, reference.full(prompt)) < ROUNDING


@on("llama", "mistral")
def test_every_passage_a_hit_and_the_last_one_ends_the_prompt(server, references):
    """Nothing but cached passages in another order: the last token is computed all the same."""
    reference = references[server.config.model]
    book = Book(17)
    pieces = donors(server, book)
    prompt, matches = book.prompt([pieces[3], pieces[0], pieces[4]], glue=0, question=0)
    matches = cached_part(matches, server.config.page_size)
    last = matches[-1]
    matches[-1] = type(last)(last.start, last.source, last.length - 1, last.donor)
    answer = server.generate(prompt, 8, recompute_ratio=0)
    assert answer.counts == (0, len(prompt) - 1, 0, 1)
    spared = expected_spared(server, matches, len(prompt), 0)
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING
