"""No reuse between trust domains, with the positive control beside every refusal."""

from __future__ import annotations

import itertools

import pytest
from comparing import difference
from prompts import Book
from server import request_body
from server_configs import on

pytestmark = pytest.mark.engine

#: Pairs that a careless encoding would take for one another.
DOMAINS = [
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"extra_key": "a"},
    {"cache_salt": "a", "extra_key": "b"},
    {"cache_salt": "b", "extra_key": "a"},
    {"cache_salt": "ab", "extra_key": "c"},
    {"cache_salt": "a", "extra_key": "bc"},
    {"extra_key": "abc"},
    {"cache_salt": "abc"},
    {"extra_key": "1:a;-;"},
    {"cache_salt": "-;", "extra_key": "-;"},
    {"cache_salt": "None"},
    {"extra_key": "None"},
    {"cache_salt": "\u00e9"},
    {"cache_salt": "e\u0301"},
]


@on("llama", "qwen3")
def test_each_domain_reuses_its_own_and_nothing_of_the_others(server):
    """Every domain serves the same donor; a domain sees a passage only after it served it."""
    book = Book(41)
    donor, pieces = book.donor([40, 40])
    prompt, _ = book.prompt(pieces[::-1])
    page = server.config.page_size
    served = len(donor) // page * page
    for domain in DOMAINS:
        stranger = server.generate(prompt, 1, fields=domain, recompute_ratio=0)
        assert stranger.counts == (0, 0, 0, len(prompt)), domain
        assert stranger.cached == 0
        # `off`: what rests on reuse would not be published.
        assert server.generate(donor, 1, fields=domain, reuse="off").cached == 0, domain
        # Positive controls: the domain itself does reuse, at the prefix and elsewhere.
        own = server.generate(donor, 1, fields=domain, reuse="exact_prefix")
        assert own.cached == min(served, (len(donor) - 1) // page * page), domain
        other, _ = Book(42).prompt(pieces)
        reused = server.generate(other, 1, fields=domain, recompute_ratio=0)
        assert reused.report["reused_tokens"] >= 32, domain


@on("llama")
def test_equal_domains_are_one_and_values_are_right(server):
    book = Book(43)
    donor, pieces = book.donor([50, 60])
    prompt, matches = book.prompt(pieces[::-1])
    domain = {"cache_salt": "tenant", "extra_key": "class"}
    server.generate(donor, 1, fields=domain)
    one = server.generate(prompt, 8, fields=dict(reversed(domain.items())), recompute_ratio=0)
    assert one.report["reused_tokens"] == sum(m.length for m in matches)
    server.generate(donor, 1)
    two = server.generate(prompt, 8, recompute_ratio=0)
    assert difference(one, two) == 0


@on("llama")
def test_an_empty_salt_is_none_as_in_sglang(server):
    """SGLang takes an empty salt for none, in the tree; the index must agree with the tree."""
    book = Book(44)
    donor, pieces = book.donor([50, 60])
    for one, other in itertools.permutations([{}, {"cache_salt": ""}], 2):
        server.flush()
        server.generate(donor, 1, fields=one)
        prefix = server.generate(donor, 1, fields=other, reuse="exact_prefix").cached
        reused = server.generate(
            book.prompt(pieces[::-1])[0], 1, fields=other, recompute_ratio=0
        ).report["reused_tokens"]
        assert (prefix > 0) == (reused > 0), (one, other, prefix, reused)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_key": 5},
        {"cache_salt": 5},
        {"cache_salt": {"a": 1}},
        {"extra_key": ["a"]},
        {"cache_salt": "\ud800"},
        {"extra_key": "\ud800"},
    ],
    ids=str,
)
@on("installed", "llama")
def test_odd_keys_do_not_end_the_server(server, fields):
    """Stock SGLang's answer (first server) may be a refusal; the scheduler must live on."""
    server.post("/generate", request_body([1, 2, 3], 1) | fields, timeout=20)
    answer = server.generate([1, 2, 3], 2)
    assert len(answer.ids) == 2
