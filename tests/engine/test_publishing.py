"""Approximate KV is never published: what rests on it is no prefix and no donor for anybody."""

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


@on("llama", "qwen3", "mistral")
def test_a_second_turn_does_not_build_on_the_first_one_s_approximation(server, references):
    reference = references[server.config.model]
    page = server.config.page_size
    book = Book(52)
    donor, pieces = book.donor([90, 150])
    prompt, matches = book.prompt(pieces[::-1])
    server.generate(donor, 1)
    first = server.generate(prompt, 24, recompute_ratio=0)
    turn = [*prompt, *first.ids, *book.passage(20)]
    exact = matches[0].start // page * page
    stock = server.generate(turn, 8, reuse="exact_prefix")
    assert stock.cached == exact
    assert largest_difference(stock, reference, reference.full(turn)) < ROUNDING
    server.flush()
    # With reuse, the donor serves again, from its stored value; the first turn's answer does not.
    server.generate(donor, 1)
    server.generate(prompt, 24, recompute_ratio=0)
    second = server.generate(turn, 8, recompute_ratio=0)
    served = cached_part(matches, page)
    spared = expected_spared(server, served, len(turn), 0)
    prefix = second.report["prefix_tokens"]
    assert prefix == exact
    assert second.report["reused_tokens"] == len(spared)
    row = reference.approximate(turn, spared, narrow_layer(server))
    assert largest_difference(second, reference, row) < ROUNDING


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


@on("llama")
def test_what_follows_a_reused_span_is_no_donor(server):
    book = Book(54)
    donor, pieces = book.donor([60])
    server.generate(donor, 1)
    prompt, _ = book.prompt(pieces)
    behind = book.passage(50)
    server.generate([*prompt, *behind], 1, recompute_ratio=0)
    answer = server.generate([943, *behind, 944], 1, recompute_ratio=0)
    assert answer.counts == (0, 0, 0, 52)
    # Positive control: computed exactly, it is one.
    server.generate([*prompt, *behind], 1, reuse="exact_prefix")
    answer = server.generate([945, *behind, 946], 1, recompute_ratio=0)
    assert answer.report["reused_tokens"] == 50


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
