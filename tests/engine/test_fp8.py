"""A server with an FP8 pool: what is stored is rounded, what is moved is rounded once more."""

from __future__ import annotations

import pytest
import torch
from comparing import copy_of, expected_spared, narrow_layer
from prompts import Book, cached_part
from reference import Reference
from server_configs import on
from tiny_models import MODELS

pytestmark = pytest.mark.engine

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rms_difference(answer, reference, row):
    """Of the log-probabilities that the server gave, along the server's own tokens.

    Server and reference add in another order, and a number that is a tie between two of FP8's
    goes either way: a few of thousands do, so that it is about the mean and not the largest.
    """
    row, squares = copy_of(row), []
    for token, top in zip(answer.ids, answer.top, strict=True):
        expected = row.logprobs()
        squares += [(float(expected[i]) - value) ** 2 for i, value in top.items()]
        reference.decode(row, token)
    return (sum(squares) / len(squares)) ** 0.5


@on(*DTYPES)
def test_an_fp8_pool_is_moved_as_the_reference_moves_it(server):
    model = MODELS[server.config.model]
    reference, unrounded = Reference(model, DTYPES[server.config.name]), Reference(model)
    book = Book(71)
    donor, pieces = book.donor([90, 50, 70])
    server.generate(donor, 1, logprobs=False)
    prompt, matches = book.prompt([pieces[2], pieces[0]])
    matches = cached_part(matches, server.config.page_size)
    for ratio in (0, 0.2, 1.0):
        answer = server.generate(prompt, 8, recompute_ratio=ratio)
        assert answer.report["decision"] == "reuse"
        spared = expected_spared(server, matches, len(prompt), ratio)
        assert answer.report["reused_tokens"] == len(spared)

        def difference(oracle, spared=spared, answer=answer):
            row = oracle.approximate(prompt, spared, narrow_layer(server))
            return rms_difference(answer, oracle, row)

        # The control: it is the rounding that is the same, not just the model.
        assert difference(reference) < 0.02
        assert difference(unrounded) > 3 * difference(reference)
    alone = server.generate(prompt, 8, reuse="off")
    row = reference.full(prompt)
    assert rms_difference(alone, reference, row) < 0.02
