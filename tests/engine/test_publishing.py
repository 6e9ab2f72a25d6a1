"""Provenance: approximate KV is published, and never taken for exact."""

from __future__ import annotations

import pytest
from comparing import difference, expected_spared, largest_difference, narrow_layer
from prompts import Book, cached_part
from server_configs import on

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


@on("llama", "qwen3", "mistral", "linear_rope")
def test_a_request_that_opts_out_gets_what_a_cold_server_gives(server, references):
    """R1 donor, R2 approximate hit, R3 the prompt of R2 with reuse opted out."""
    reference = references[server.config.model]
    page = server.config.page_size
    book = Book(51)
    donor, pieces = book.donor([90, 150])
    # The prompt begins with exact tokens of its own, longer than a page.
    prompt, matches = book.prompt(pieces[::-1], glue=70)
    server.generate(donor, 1)
    approximate = server.generate(prompt, 16, recompute_ratio=0)
    assert approximate.report["reused_tokens"] > 100
    exact = matches[0].start // page * page
    for mode in ("exact_prefix", "off", "exact_prefix"):
        answer = server.generate(prompt, 16, reuse=mode)
        assert answer.cached == (0 if mode == "off" else exact)
        assert largest_difference(answer, reference, reference.full(prompt)) < ROUNDING
        # From here on R3's exact KV is in the tree.
        exact = (len(prompt) - 1) // page * page


@on("llama", "qwen3", "qwen2")
def test_a_second_turn_builds_on_the_first_one_s_approximation(server, references):
    """Prompt and answer of the first turn are an approximate prefix of the second: for requests
    that ask for the same quality, and for nobody else."""
    reference = references[server.config.model]
    page = server.config.page_size
    book = Book(52)
    donor, pieces = book.donor([90, 150])
    prompt, matches = book.prompt(pieces[::-1])
    server.generate(donor, 1)
    first = server.generate(prompt, 40, recompute_ratio=0)
    turn = [*prompt, *first.ids, *book.passage(20)]
    spared = expected_spared(server, cached_part(matches, page), len(prompt), 0)
    row = reference.approximate(prompt, spared, narrow_layer(server))
    row = reference.extend(row, turn[len(prompt) :])
    second = server.generate(turn, 8, recompute_ratio=0)
    exact = matches[0].start // page * page
    # The last token of the answer was never fed to the model.
    cached = (len(prompt) + len(first.ids) - 1) // page * page
    assert second.counts == (exact, cached - exact, 0, len(turn) - cached)
    assert second.cached == exact
    assert largest_difference(second, reference, row) < ROUNDING
    stock = server.generate(turn, 8, reuse="exact_prefix")
    assert stock.cached == exact
    assert largest_difference(stock, reference, reference.full(turn)) < ROUNDING


@on("llama")
def test_another_quality_has_a_branch_of_its_own(server):
    """A request that asks for more recomputing does not get what was computed with less."""
    book = Book(63)
    donor, pieces = book.donor([100])
    prompt, _ = book.prompt(pieces)
    turn = [*prompt, *book.passage(20)]
    server.generate(donor, 1)
    server.generate(prompt, 4, recompute_ratio=0)
    other = server.generate(turn, 4, recompute_ratio=0.5)
    # The donor serves again, from its stored values.
    assert other.counts == (2, 50, 50, 25)
    again = server.generate([*turn, 950], 4, recompute_ratio=0.5)
    assert again.counts == (52, len(turn) - 52, 0, 1)


@on("llama")
def test_a_third_and_a_forked_turn_stay_on_the_branch(server, references):
    """One level of approximation, however long the conversation: nothing is moved twice."""
    reference = references[server.config.model]
    book = Book(59)
    donor, pieces = book.donor([90])
    prompt, matches = book.prompt(pieces)
    server.generate(donor, 1)
    spared = expected_spared(server, matches, len(prompt), 0)
    row = reference.approximate(prompt, spared, 0)
    turn = prompt
    for _ in range(3):
        answer = server.generate(turn, 6, recompute_ratio=0)
        assert largest_difference(answer, reference, row) < ROUNDING
        more = [*answer.ids, *book.passage(9)]
        turn, row = [*turn, *more], reference.extend(row, more)
    # A fork in the middle of the branch: its node is split.
    middle = len(prompt) + 10
    forked = [*turn[:middle], *book.passage(12)]
    row = reference.extend(reference.approximate(prompt, spared, 0), forked[len(prompt) :])
    answer = server.generate(forked, 6, recompute_ratio=0)
    assert answer.report["reused_tokens"] == middle - matches[0].start
    assert largest_difference(answer, reference, row) < ROUNDING


@on("llama", "qwen3")
def test_a_branch_gives_nothing_to_prompt_logprobs(server, references):
    """Log-probabilities of prompt tokens are exact, and so is what follows them."""
    reference = references[server.config.model]
    page = server.config.page_size
    book = Book(60)
    donor, pieces = book.donor([90, 150])
    prompt, matches = book.prompt(pieces)
    server.generate(donor, 1)
    server.generate(prompt, 4, recompute_ratio=0)
    # Positive control: without them the branch serves.
    other = server.generate([*prompt, *book.passage(20)], 4, recompute_ratio=0)
    assert other.report["reused_tokens"] > 200
    turn = [*prompt, *book.passage(20)]
    start = matches[1].start
    answer = server.generate(turn, 4, recompute_ratio=0, logprob_start_len=start)
    exact = matches[0].start // page * page
    assert answer.counts == (exact, 0, 0, len(turn) - exact)
    assert answer.report["reason"] == "prompt_logprobs"
    assert largest_difference(answer, reference, reference.full(turn)) < ROUNDING


@on("llama", "qwen3")
def test_an_answer_whose_thinking_was_stripped_is_found_at_its_new_offset(server, references):
    """The client sends the answer back without the tokens before it."""
    reference = references[server.config.model]
    page = server.config.page_size
    book = Book(61)
    prompt = book.passage(40)
    first = server.generate(prompt, 90)
    thinking, kept = first.ids[:25], first.ids[25:]
    turn = [*prompt, *kept, *book.passage(10)]
    answer = server.generate(turn, 8, recompute_ratio=0)
    cached = (len(prompt) + len(first.ids) - 1) // page * page
    reused = cached - len(prompt) - len(thinking)
    prefix = len(prompt) // page * page
    # Where pages end the prefix before the prompt does, the rest of the prompt is too short a run.
    assert answer.counts == (prefix, reused, 0, len(turn) - prefix - reused)
    whole = (*prompt, *first.ids)
    spared = {len(prompt) + i: (whole, len(prompt) + len(thinking) + i) for i in range(reused)}
    row = reference.approximate(turn, spared, narrow_layer(server))
    assert largest_difference(answer, reference, row) < ROUNDING


@on("llama", "mistral")
def test_what_was_computed_on_reused_values_serves_up_to_max_depth(server, references):
    """The answer of an approximate turn, stripped and moved. It rests on an approximation, and
    moving it adds another: allowed at ``max_depth`` 1, not at 0."""
    reference = references[server.config.model]
    book = Book(62)
    donor, pieces = book.donor([130])
    server.generate(donor, 1)
    prompt, matches = book.prompt(pieces)
    spared = expected_spared(server, cached_part(matches, server.config.page_size), len(prompt), 0)
    row = reference.approximate(prompt, spared, 0)
    first = server.generate(prompt, 150, recompute_ratio=0)
    assert largest_difference(first, reference, row) < ROUNDING
    row = reference.extend(row, first.ids)
    page = server.config.page_size
    begin = -(-len(prompt) // page) * page
    passage = row.tokens[begin : (len(row.tokens) - 1) // page * page]
    assert len(passage) >= 64
    moved = [941, *passage, 942, 943]
    answer = server.generate(moved, 8, recompute_ratio=0)
    if server.config.flag("--kvshare-max-depth", 1) == 0:
        assert answer.counts == (0, 0, 0, len(moved))
        assert largest_difference(answer, reference, reference.full(moved)) < ROUNDING
        return
    assert answer.counts == (0, len(passage), 0, 3)
    twice = {1 + i: (row, begin + i) for i in range(len(passage))}
    row = reference.approximate(moved, twice, 0)
    assert largest_difference(answer, reference, row) < ROUNDING
    # What was moved is no donor: the third one gets it from the first, and nothing is deeper.
    third = [944, 945, *moved[1:-2], 946]
    answer = server.generate(third, 8, recompute_ratio=0)
    assert answer.report["donors"] == 1
    thrice = {position + 1: source for position, source in twice.items()}
    row = reference.approximate(third, thrice, 0)
    assert largest_difference(answer, reference, row) < ROUNDING


@on("llama")
def test_exact_new_tokens_are_published_as_donors(server, references):
    """Three requests: the third reuses what the second computed before its first reused span."""
    reference = references[server.config.model]
    book = Book(53)
    donor, pieces = book.donor([60])
    server.generate(donor, 1)
    own = book.passage(50)
    prompt, _ = book.prompt(pieces)
    second = [*own, *prompt]
    assert server.generate(second, 1, recompute_ratio=0).report["reused_tokens"] == 60
    third = [941, *own, 942]
    answer = server.generate(third, 8, recompute_ratio=0)
    assert answer.counts == (0, 50, 0, 2)
    spared = {1 + i: (tuple(second), i) for i in range(50)}
    row = reference.approximate(third, spared, 0)
    assert largest_difference(answer, reference, row) < ROUNDING


@on("llama", "qwen3")
def test_ratio_one_publishes_everything(server):
    """Nothing was placed, so that all of it is exact and may be a prefix."""
    page = server.config.page_size
    book = Book(55)
    donor, pieces = book.donor([60, 80])
    server.generate(donor, 1)
    prompt, _ = book.prompt(pieces[::-1])
    answer = server.generate(prompt, 8, recompute_ratio=1)
    assert answer.report["recomputed_tokens"] > 0
    again = server.generate(prompt, 8, reuse="exact_prefix")
    assert again.cached == (len(prompt) - 1) // page * page
    assert difference(answer, again) < ROUNDING


@on("llama", "mistral")
def test_a_flush_takes_the_donors_along(server):
    book = Book(56)
    donor, pieces = book.donor([90, 90])
    server.generate(donor, 1)
    prompt, _ = book.prompt(pieces[::-1])
    assert server.generate(prompt, 1, recompute_ratio=0).report["reused_tokens"] > 0
    server.flush()
    assert server.generate(prompt, 1, recompute_ratio=0).counts == (0, 0, 0, len(prompt))


@on("llama", "mistral")
def test_new_weights_leave_no_donor_of_the_old_ones(server, references):
    """The same weights, loaded anew: SGLang flushes its cache, and the index goes with it."""
    reference = references[server.config.model]
    book = Book(57)
    donor, pieces = book.donor([90, 90])
    server.generate(donor, 1)
    prompt, _ = book.prompt(pieces[::-1])
    folder = server.model
    response = server.post("/update_weights_from_disk", {"model_path": str(folder)})
    assert response.status_code == 200, response.text
    answer = server.generate(prompt, 8, recompute_ratio=0)
    assert answer.counts == (0, 0, 0, len(prompt))
    assert largest_difference(answer, reference, reference.full(prompt)) < ROUNDING


@on("llama")
def test_a_session_is_served_without_reuse(server):
    book = Book(58)
    donor, pieces = book.donor([90, 90])
    server.generate(donor, 1)
    prompt, _ = book.prompt(pieces[::-1])
    session = server.post("/open_session", {"capacity_of_str_len": 1000}).json()
    first = server.generate(prompt, 4, fields={"session_params": {"id": session}})
    assert first.report["reason"] == "unsupported_request"
    assert first.counts == (0, 0, 0, len(prompt))
    server.post("/close_session", {"session_id": session})
