"""The error falls as more is recomputed, for every selector, over a fixed set of prompts.

Single prompts need not be monotone; their geometric mean is.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

import pytest
from comparing import difference
from prompts import Book
from server_configs import on

from sglang_kvshare.recompute.selectors import selector_named, selector_names

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
PROMPTS = 8
#: Those that have a ratio.
SELECTORS = [name for name in selector_names() if selector_named(name).fixed_ratio is None]


@dataclass
class Prompts:
    """A fixed set of prompts whose passages are in the cache, and the errors of answers to them."""

    server: object
    prompts: list[list[int]]
    truths: list

    @classmethod
    def on(cls, server, reference, seed, *, prefix_tokens=0):
        """``prefix_tokens``: of an exact prefix before the passages."""
        prompts = []
        for number in range(PROMPTS):
            book = Book(seed + number)
            donor, pieces = book.donor([50, 40, 60])
            server.generate(donor, 1, logprobs=False)
            base = book.passage(prefix_tokens + 20)
            if prefix_tokens:
                server.generate(base, 1, logprobs=False)
            prompts.append([*base[:prefix_tokens], *book.prompt([pieces[2], pieces[0]])[0]])
        return cls(server, prompts, [reference.full(prompt).logprobs() for prompt in prompts])

    def answers(self, n_new=1, **settings):
        common = {"n_new": n_new, "publish": False, **settings}
        return self.server.concurrently([{"ids": ids, **common} for ids in self.prompts])

    def error(self, **settings):
        """Geometric mean of the largest error among the most probable next tokens."""
        errors = []
        for answer, truth in zip(self.answers(**settings), self.truths, strict=True):
            top = answer.top[0]
            errors.append(max(abs(float(truth[i]) - told) for i, told in top.items()))
        return geometric_mean(errors)


@on("llama")
def test_the_error_falls_with_the_ratio_for_every_selector(server, references):
    cases = Prompts.on(server, references["llama"], 500)
    nothing = cases.error(recompute_ratio=0)
    # Positive control: reuse without repair is far from full recomputation.
    assert nothing > 100 * ROUNDING
    for name in SELECTORS:
        little, half, everything = (
            cases.error(selector=name, recompute_ratio=ratio) for ratio in (0.1, 0.5, 1.0)
        )
        assert nothing > little > half > 10 * everything, (name, nothing, little, half, everything)
        assert everything < ROUNDING, name


@pytest.mark.parametrize("name", ["seams", "contribution", "dhd"])
@pytest.mark.parametrize("prefix_tokens", [0, 48])
@on("qwen3", "glm4")
def test_it_falls_behind_a_prefix_and_across_chunk_borders(server, references, name, prefix_tokens):
    """Chunks of 64 tokens, prompts of 119 and more, pages of 16."""
    page = server.config.page_size
    prefix_tokens = -(-prefix_tokens // page) * page
    reference = references[server.config.model]
    sets = []
    # Which prompts share a batch decides where their chunks end: more than one set, each as large
    # as the cache.
    for seed in (520, 530):
        server.flush()
        cases = Prompts.on(server, reference, seed, prefix_tokens=prefix_tokens)
        for answer in cases.answers(recompute_ratio=0):
            assert answer.report["prefix_tokens"] == prefix_tokens
            assert answer.report["reused_tokens"] > 30
        sets.append([cases.error(selector=name, recompute_ratio=r) for r in (0, 0.1, 0.5, 1)])
    errors = [geometric_mean(of_ratio) for of_ratio in zip(*sets, strict=True)]
    assert errors == sorted(errors, reverse=True), errors
    assert errors[0] > 100 * ROUNDING > 100 * errors[-1], errors


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
@on("llama")
def test_both_stages_keep_the_books_of_every_selector(server, references, ratio):
    """Refreshing begins behind the first token, and with ratio 1 there is nothing to refresh."""
    cases = Prompts.on(server, references["llama"], 540)
    for name in SELECTORS:
        settings = {"selector": name, "recompute_ratio": ratio}
        plain = cases.answers(n_new=4, **settings)
        refreshed = cases.answers(n_new=4, refresh_tokens=4, **settings)
        for one, other in zip(plain, refreshed, strict=True):
            assert one.counts == other.counts
            assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=ROUNDING)
            assert one.report["refreshed_tokens"] == 0
            assert (other.report["refreshed_tokens"] > 0) == (ratio < 1), name
            if ratio == 0:
                assert one.report["recomputed_tokens"] == 0
            if ratio == 1:
                assert one.report["reused_tokens"] == 0
                assert difference(one, other) < ROUNDING


@on("llama", "mistral")
def test_ratio_one_after_a_refresh_equals_full(server, references):
    """Refreshed values are published as approximate, and serve nobody who asks for exact ones."""
    cases = Prompts.on(server, references[server.config.model], 560)
    refreshed = cases.answers(
        n_new=24, refresh_tokens=8, recompute_ratio=0, selector="query", publish=True
    )
    assert all(answer.report["refreshed_tokens"] > 30 for answer in refreshed)
    # The turn that follows it, as well.
    cases.prompts = [
        [*prompt, *answer.ids] for prompt, answer in zip(cases.prompts, refreshed, strict=True)
    ]
    again = cases.answers(n_new=8, recompute_ratio=1, refresh_tokens=8)
    server.flush()
    for one, other in zip(again, cases.answers(n_new=8, reuse="off"), strict=True):
        assert one.report["reused_tokens"] == one.report["refreshed_tokens"] == 0
        assert difference(one, other) < ROUNDING
