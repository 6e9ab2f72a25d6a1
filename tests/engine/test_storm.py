"""Slots are conserved and results stay right under aborts, evictions and forced retraction.

The servers named here retract at every fifth step, have a pool that a few prompts fill, and run
SGLang's strict checks at every step; the pages are of 1, 16 and 64 tokens.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import requests
from comparing import difference, largest_difference
from prompts import Book
from server import check_counts, request_body, to_answer
from server_configs import STORMY, on

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
SECONDS = 8
REASONS = ("ok", "donor_evicted", "no_match", "below_minimum", "prefix_covers_prompt")


def probe(server):
    """A fixed sequence of requests on an empty cache, reuse among them."""
    server.flush()
    book = Book(71)
    donor, pieces = book.donor([90, 70])
    prompt, _ = book.prompt(pieces[::-1])
    return [
        server.generate(donor, 8),
        server.generate(prompt, 8, recompute_ratio=0),
        server.generate(prompt, 8, recompute_ratio=0.5),
        server.generate(prompt, 8, recompute_ratio=1),
        server.generate(prompt, 8, reuse="off"),
    ]


def same(before, after):
    for one, other in zip(before, after, strict=True):
        assert one.report == other.report
        assert difference(one, other) < ROUNDING


def storm(server, seed, seconds, exact):
    """Concurrent clients with random prompts, modes and aborts; returns what they saw."""
    deadline = time.monotonic() + seconds
    book = Book(seed)
    donors = [book.donor([80, 60, 100]) for _ in range(6)]
    faults, finished, aborted = [], [], []
    lock = threading.Lock()

    def client(number):
        rng = random.Random(seed * 100 + number)
        turn = 0
        while time.monotonic() < deadline:
            turn += 1
            try:
                with lock:
                    donor, pieces = rng.choice(donors)
                    chosen = rng.sample(pieces, rng.randint(1, 3))
                    prompt = rng.choice([list(donor), book.prompt(chosen)[0]])
                settings = rng.choice(exact)
                rid = f"storm-{seed}-{number}-{turn}"
                body = request_body(prompt, rng.randint(1, 30), kvshare=settings) | {"rid": rid}
                if rng.random() < 0.35:
                    delay = rng.choice([0, 0.02, 0.1, 0.3, 0.8])
                    threading.Timer(delay, server.abort, [rid]).start()
                impatient = rng.random() < 0.1
                try:
                    response = server.post("/generate", body, timeout=0.3 if impatient else 120)
                except requests.ReadTimeout:
                    # The client is gone; SGLang aborts what it asked for.
                    assert impatient
                    continue
                if response.status_code != 200:
                    with lock:
                        aborted.append(response.text)
                    continue
                answer = to_answer(response.json())
                if answer.meta["finish_reason"]["type"] == "abort":
                    with lock:
                        aborted.append(rid)
                    continue
                check_counts(answer, len(prompt))
                with lock:
                    finished.append((prompt, settings, answer))
            except Exception as error:
                with lock:
                    faults.append(repr(error))
                if isinstance(error, requests.ConnectionError):
                    return

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    time.sleep(1)  # the last timers
    assert faults == []
    return finished, aborted


EXACT = [{"recompute_ratio": 1.0}, {"reuse": "off"}, {"reuse": "exact_prefix"}]
ANY = [*EXACT, {}, {"recompute_ratio": 0}, {"recompute_ratio": 0.5}]


@on(*STORMY)
def test_a_storm_leaves_no_trace(server):
    before = probe(server)
    server.flush()
    finished, aborted = storm(server, 72, SECONDS, ANY)
    server.assert_healthy()
    assert len(finished) > 10
    # Positive controls: the storm did what it is for.
    assert any(answer.report["reused_tokens"] for _, _, answer in finished)
    assert aborted
    same(before, probe(server))


@on(*STORMY)
def test_retracted_requests_end_as_if_they_had_not_been(server, references):
    """Every fifth step of decoding sends some back to the queue; they prefill again, output and
    all, and exact ones must not notice."""
    reference = references[server.config.model]
    book = Book(78)
    donor, pieces = book.donor([50, 40])
    server.generate(donor, 1, logprobs=False)
    prompts = [book.prompt(pieces[::-1])[0] for _ in range(5)]
    modes = [*EXACT, {"recompute_ratio": 0}, {}]
    calls = [
        {"ids": prompt, "n_new": 40, **mode} for prompt, mode in zip(prompts, modes, strict=True)
    ]
    answers = server.concurrently(calls)
    assert sum(answer.meta["num_retractions"] for answer in answers) > 3
    for prompt, mode, answer in zip(prompts, modes, answers, strict=True):
        assert len(answer.ids) == 40
        assert answer.cached <= len(prompt)
        if mode in EXACT:
            assert largest_difference(answer, reference, reference.full(prompt)) < 5e-4
        else:
            assert answer.report["reused_tokens"] > 0


@on(*STORMY)
def test_exact_modes_stay_exact_in_a_storm_of_approximations(server, references):
    """Retracted, evicted and resumed beside approximate requests, exact ones stay exact."""
    reference = references[server.config.model]
    finished, _ = storm(server, 73, SECONDS, [*EXACT, *ANY])
    server.assert_healthy()
    checked = 0
    for prompt, settings, answer in finished:
        if settings in EXACT:
            assert largest_difference(answer, reference, reference.full(prompt)) < 5e-4
            checked += 1
    assert checked > 5


@on(*STORMY)
def test_donors_give_way_before_an_allocation_fails(server, references):
    """Donors of 800 tokens in a pool of 1024 slots or a few more, and prompts of 600: donors are
    evicted between planning and copy, or while a prompt is prefilled in chunks."""
    reference = references[server.config.model]
    book = Book(74)
    donors = [book.donor([180, 180]) for _ in range(2)]
    for donor, _ in donors:
        server.generate(donor, 1, logprobs=False)
    pieces = [piece for _, found in donors for piece in found]
    orders = [(3, 0, 1), (2, 1, 3), (0, 2, 3), (1, 0)]
    prompts = [book.prompt([pieces[i] for i in order])[0] for order in orders]
    answers = server.concurrently([{"ids": p, "n_new": 6, "recompute_ratio": 0} for p in prompts])
    for answer in answers:
        report = answer.report
        assert report["reason"] in REASONS, report
        assert (report["decision"] == "reuse") == (report["reused_tokens"] > 0)
    # A prompt that finds no donor any more is computed, and right.
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer.report["reused_tokens"] and not answer.report["prefix_tokens"]:
            assert largest_difference(answer, reference, reference.full(prompt)) < 5e-4


@on(*STORMY)
def test_one_request_that_needs_the_whole_pool(server, references):
    """Donors hold most of the pool while a long prompt comes in chunks: it must not starve."""
    reference = references[server.config.model]
    book = Book(75)
    donor, pieces = book.donor([250, 250])
    server.generate(donor, 1, logprobs=False)
    prompt = [*book.passage(300), *pieces[1].tokens(), *book.passage(300)]
    answer = server.generate(prompt, 8, recompute_ratio=0)
    assert answer.report["reason"] in ("ok", "donor_evicted")
    if not answer.report["reused_tokens"]:
        row = reference.full(prompt)
        assert largest_difference(answer, reference, row) < 5e-4


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.5])
@on(*STORMY)
def test_an_abort_at_any_time_of_a_chunked_prefill(server, delay):
    book = Book(76)
    donor, pieces = book.donor([200, 200])
    server.generate(donor, 1, logprobs=False)
    prompt, _ = book.prompt(pieces[::-1], glue=60)
    timer = threading.Timer(delay, server.abort, ["to-abort"])
    timer.start()
    body = request_body(prompt, 40, kvshare={"recompute_ratio": 0.3}) | {"rid": "to-abort"}
    server.post("/generate", body)
    timer.join()
    server.assert_healthy()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@on(*STORMY)
def test_a_pause_of_generation(server, mode):
    book = Book(77)
    donor, pieces = book.donor([90, 150])
    server.generate(donor, 1, logprobs=False)
    prompts = [book.prompt(pieces[::-1])[0] for _ in range(3)]
    answers = []
    calls = [{"ids": prompt, "n_new": 30, "recompute_ratio": 0} for prompt in prompts]
    runner = threading.Thread(target=lambda: answers.extend(server.concurrently(calls)))
    runner.start()
    time.sleep(0.5)
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    time.sleep(0.2)
    assert server.post("/continue_generation", {}).status_code == 200
    runner.join()
    assert [len(answer.ids) for answer in answers] == [30] * 3
