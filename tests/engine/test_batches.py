"""Requests side by side: a batch gives each what it gets alone."""

from __future__ import annotations

import threading

import pytest
from comparing import expected_spared, largest_difference, narrow_layer
from prompts import Book, cached_part
from server import check_counts, request_body, to_answer
from server_configs import on

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


class Load:
    """Requests of all kinds, with passages of their own, and what each must give."""

    def __init__(self, server, reference, seed, kinds):
        self.server, self.reference = server, reference
        book = Book(seed)
        self.calls, self.rows = [], []
        for number, (ratio, lengths) in enumerate(kinds):
            donor, pieces = book.donor(list(lengths))
            if ratio != "cold":
                server.generate(donor, 1, logprobs=False)
            prompt, matches = book.prompt(pieces[::-1], glue=1 + number % 4)
            if ratio in ("off", "cold"):
                settings = {"reuse": "off"} if ratio == "off" else {}
                row = reference.full(prompt)
            else:
                settings = {} if ratio is None else {"recompute_ratio": ratio}
                served = cached_part(matches, server.config.page_size)
                spared = expected_spared(server, served, len(prompt), ratio)
                row = reference.approximate(prompt, spared, narrow_layer(server))
            self.calls.append({"ids": prompt, "n_new": 4 + 3 * (number % 3), **settings})
            self.rows.append(row)

    def check(self, answers):
        for call, row, answer in zip(self.calls, self.rows, answers, strict=True):
            assert len(answer.ids) == call["n_new"]
            assert largest_difference(answer, self.reference, row) < ROUNDING, call


KINDS = [
    (0, (40, 30)),
    ("cold", (35,)),
    (None, (60, 90, 20)),
    ("off", (50, 20)),
    (0.5, (100,)),
    (1.0, (30, 30, 30)),
    (0, (140, 70)),
    ("cold", (20, 130)),
]


@on("llama", "qwen3", "mistral")
def test_one_batch_of_all_kinds(server, references):
    """One HTTP request with a list, so that they are admitted together."""
    load = Load(server, references[server.config.model], 61, KINDS)
    bodies = [
        request_body(
            call["ids"],
            call["n_new"],
            kvshare={k: v for k, v in call.items() if k not in ("ids", "n_new")},
        )
        for call in load.calls
    ]
    response = server.post(
        "/generate",
        {
            "input_ids": [body["input_ids"] for body in bodies],
            "sampling_params": [body["sampling_params"] for body in bodies],
            "return_logprob": [True] * len(bodies),
            "top_logprobs_num": [20] * len(bodies),
        },
    )
    assert response.status_code == 200, response.text
    answers = [to_answer(data) for data in response.json()]
    for body, answer in zip(bodies, answers, strict=True):
        check_counts(answer, len(body["input_ids"]))
    load.check(answers)


@on("llama", "qwen3", "mistral")
def test_some_want_logprobs_and_some_do_not(server, references):
    """SGLang prunes a batch's rows by each request's start of log-probabilities."""
    reference = references[server.config.model]
    book = Book(62)
    bodies, rows = [], []
    for ratio in (0, 0, 0.5, 0):
        donor, pieces = book.donor([45, 75])
        server.generate(donor, 1, logprobs=False)
        prompt, matches = book.prompt(pieces[::-1])
        served = cached_part(matches, server.config.page_size)
        spared = expected_spared(server, served, len(prompt), ratio)
        rows.append(reference.approximate(prompt, spared, narrow_layer(server)))
        bodies.append(request_body(prompt, 6, kvshare={"recompute_ratio": ratio}))
    cold = book.passage(50)
    bodies.append(request_body(cold, 6))
    rows.append(reference.full(cold))
    wants = [True, False, True, False, True]
    # The whole prompt's for the cold one; the last token's for one with reuse.
    starts = [-1, -1, len(bodies[2]["input_ids"]) - 1, -1, 0]
    response = server.post(
        "/generate",
        {
            "input_ids": [body["input_ids"] for body in bodies],
            "sampling_params": [body["sampling_params"] for body in bodies],
            "return_logprob": wants,
            "logprob_start_len": starts,
            "top_logprobs_num": [20 * want for want in wants],
        },
    )
    assert response.status_code == 200, response.text
    answers = [to_answer(data) for data in response.json()]
    for answer, row, want in zip(answers, rows, wants, strict=True):
        if want:
            assert largest_difference(answer, reference, row) < ROUNDING
        else:
            assert answer.ids[0] == int(row.logits.argmax())
    assert len(answers[4].input_logprobs) == len(cold)


@on("llama", "qwen3", "mistral")
def test_prefills_while_others_decode(server, references):
    """With mixed chunks the decoding rows ride in the narrowed extend. SGLang does not mix a
    batch in which somebody wants log-probabilities, so that tokens are compared."""
    reference = references[server.config.model]
    load = Load(server, reference, 63, KINDS[:7])
    book = Book(64)
    long = [{"ids": book.passage(30), "n_new": 60} for _ in range(2)]
    for call in (*load.calls, *long):
        call["logprobs"] = False
    decoding = []
    runner = threading.Thread(target=lambda: decoding.extend(server.concurrently(long)))
    runner.start()
    answers = server.concurrently(load.calls)
    runner.join()
    for call, row, answer in zip(load.calls, load.rows, answers, strict=True):
        assert list(answer.ids) == greedy(reference, row, call["n_new"])
    for call, answer in zip(long, decoding, strict=True):
        assert list(answer.ids) == greedy(reference, reference.full(call["ids"]), call["n_new"])


def greedy(reference, row, count):
    from comparing import copy_of

    row, ids = copy_of(row), []
    for _ in range(count):
        ids.append(int(row.logits.argmax()))
        reference.decode(row, ids[-1])
    return ids
