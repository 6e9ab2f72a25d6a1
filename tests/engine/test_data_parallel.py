"""Two replicas behind one address: each has an index of its own, and reuses what it has."""

from __future__ import annotations

import time
from contextlib import contextmanager

import msgspec
import pytest
import requests
import zmq
from comparing import expected_spared, largest_difference, narrow_layer
from prompts import Book
from server_configs import EVENTS_PORT, on

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


def at(replica):
    return {"routed_dp_rank": replica}


def pictures(server):
    """Tokens in the tree of each replica."""
    told = []
    for replica in (0, 1):
        asked = {"format": "json", "replica": replica}
        response = requests.get(server.url + "/kvshare/tree", params=asked, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["replicas"] == 2
        told.append(response.json()["tokens"])
    return told


@on("two_replicas")
def test_a_replica_reuses_what_it_has_computed_itself(server, references):
    reference = references[server.config.model]
    book = Book(501)
    donor, pieces = book.donor([60, 50])
    prompt, matches = book.prompt(pieces[::-1])
    server.generate(donor, 1, logprobs=False, fields=at(0))
    cold = server.generate(prompt, 8, recompute_ratio=0, publish=False, fields=at(1))
    assert cold.report["reused_tokens"] == 0
    assert cold.report["reason"] == "no_match"
    warm = server.generate(prompt, 8, recompute_ratio=0, publish=False, fields=at(0))
    spared = expected_spared(server, matches, len(prompt), 0)
    assert warm.report["reused_tokens"] == len(spared) > 0
    row = reference.approximate(prompt, spared, narrow_layer(server))
    assert largest_difference(warm, reference, row) < ROUNDING
    assert largest_difference(cold, reference, reference.full(prompt)) < ROUNDING
    # The control: once the other replica has the passages, it reuses them as well.
    server.generate(donor, 1, logprobs=False, fields=at(1))
    again = server.generate(prompt, 8, recompute_ratio=0, publish=False, fields=at(1))
    assert again.report["reused_tokens"] == len(spared)


@on("two_replicas")
def test_the_operator_sees_and_the_flush_empties_both(server):
    book = Book(502)
    for replica in (0, 1):
        for _ in range(replica + 1):
            donor, _ = book.donor([60, 50])
            server.generate(donor, 1, logprobs=False, fields=at(replica))
    held = pictures(server)
    assert 0 < held[0] < held[1]
    server.flush()
    assert pictures(server) == [0, 0]


@contextmanager
def router():
    """What a router hears: a function that returns the token ids that each replica has stored since
    it was last asked."""
    context = zmq.Context()
    sockets = []
    for replica in (0, 1):
        socket = context.socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{EVENTS_PORT + replica}")
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        sockets.append(socket)
    # A subscription takes a moment to arrive.
    time.sleep(1)

    def heard():
        stored = [[], []]
        for replica, socket in enumerate(sockets):
            while socket.poll(1500):
                _, _, payload = socket.recv_multipart()
                _, told, rank = msgspec.msgpack.decode(payload)
                assert rank == replica
                for event in told:
                    if event["type"] == "BlockStored":
                        stored[replica] += event["token_ids"]
        return stored

    try:
        yield heard
    finally:
        context.destroy(linger=0)


@on("two_replicas")
def test_a_router_hears_of_each_replicas_prefixes_and_of_no_approximation(server):
    """Routing by prefix stays right: who sends a prompt to where its blocks are finds them."""
    book = Book(503)
    donor, pieces = book.donor([60, 50])
    approximate, matches = book.prompt(pieces[::-1])
    exact, _ = book.prompt(pieces[::-1])
    with router() as heard:
        server.generate(donor, 1, logprobs=False, fields=at(1))
        assert heard() == [[], list(donor)]
        answer = server.generate(approximate, 1, logprobs=False, recompute_ratio=0, fields=at(1))
        assert answer.report["reused_tokens"] > 0
        # Up to the first token that rests on an approximation.
        assert heard() == [[], list(approximate[: matches[0].start])]
        server.generate(exact, 1, logprobs=False, reuse="exact_prefix", fields=at(0))
        assert heard() == [list(exact), []]
