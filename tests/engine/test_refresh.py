"""The decode stage: prompt tokens recomputed as extra rows of decode batches."""

from __future__ import annotations

import pytest
from comparing import difference, expected_spared, largest_difference, narrow_layer
from server_configs import on
from test_selection import CHECK, by, difference_or_tokens, made, times

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
#: Fewer steps than pass before attention is looked at.
STEPS = 8


def queue_of(case, scores, weights=None):
    """What waits behind the prefill, the most important first, and when it ends."""
    left = {p: scores[p] for p in case.spared(scores) if scores[p] > 0}
    return left, 0.02 * sum(left.values())


def in_steps(left, end, count, steps):
    """The positions of each decode step."""
    left, taken = dict(left), []
    for _ in range(steps):
        if sum(left.values()) <= end:
            taken.append([])
            continue
        best = sorted(left, key=lambda p: (-left[p], p))[:count]
        for p in best:
            del left[p]
        taken.append(sorted(best))
    return taken


@pytest.mark.parametrize(("name", "count"), [("dhd", 3), ("dhd", 1), ("query", 3), ("seams", 3)])
@on("llama", "glm4")
def test_refreshed_rows_are_what_recomputing_them_gives(server, references, name, count):
    check_refreshed(server, references, name, count)


def check_refreshed(server, references, name, count):
    prompt, case = made(server, references, 400, 0.25)
    settings = by(name) | {"recompute_ratio": 0.25, "publish": False}
    plain = server.generate(prompt, STEPS, **settings)
    answer = server.generate(prompt, STEPS, refresh_tokens=count, **settings)
    assert plain.report["refreshed_tokens"] == 0
    if name == "seams":
        # Nothing was measured: in order of position.
        spared = expected_spared(server, case.matches, len(prompt), 0.25)
        left, end, layer = dict.fromkeys(spared, 1.0), 0.02 * len(spared), narrow_layer(server)
    else:
        scores = case.probe_attention()
        if name == "dhd":
            scores = times(scores, case.value_l1(CHECK))
        spared, (left, end) = case.spared(scores), queue_of(case, scores)
        layer = CHECK + 1 if name == "dhd" else narrow_layer(server)
    steps = in_steps(left, end, count, STEPS - 1)
    assert answer.report["refreshed_tokens"] == sum(map(len, steps)) == count * (STEPS - 1)
    row = case.reference.approximate(prompt, spared, layer)
    assert largest_difference(answer, case.reference, row, steps) < ROUNDING
    # Positive control: it does change what follows.
    assert difference_or_tokens(plain, answer) > 5 * ROUNDING


@on("llama", "qwen3")
def test_all_of_it_refreshed_comes_close_to_full(server, references):
    """Each refreshed row rests on what was not refreshed yet, so that it is not exact; but the
    answer's end is closer to full recomputation than without."""
    prompt, case = made(server, references, 401, 0.0)
    settings = by("none") | {"publish": False}
    drift = {}
    for count in (0, 16):
        answer = server.generate(prompt, 24, refresh_tokens=count, **settings)
        moved = 0.0
        assert answer.report["refreshed_tokens"] == (count and len(case.placed))
        exact = case.reference.full(prompt)
        exact = type(exact)(list(exact.tokens), list(exact.keys), list(exact.values), exact.logits)
        for token, top in zip(answer.ids, answer.top, strict=True):
            expected = exact.logprobs()
            moved = max(abs(float(expected[i]) - value) for i, value in top.items())
            case.reference.decode(exact, token)
        drift[count] = moved
    assert drift[16] < 0.5 * drift[0]


@on("llama")
def test_a_request_without_reuse_is_not_touched(server):
    from prompts import Book

    prompt = Book(402).passage(80)
    one = server.generate(prompt, 8, refresh_tokens=8, publish=False)
    other = server.generate(prompt, 8, publish=False)
    assert one.report["refreshed_tokens"] == 0
    assert difference(one, other) < ROUNDING


@on("llama", "qwen3", "qwen2")
def test_refreshing_requests_beside_others(server, references):
    """Batches, mixed chunks, retraction and aborts: nobody else's answer moves, and nothing leaks
    (the server's own checks, and the fixture's)."""
    calls, expected = [], []
    for number in range(6):
        prompt, case = made(server, references, 410 + number, 0.3)
        settings = by("dhd") | {"recompute_ratio": 0.3, "publish": False}
        calls.append({"ids": prompt, "n_new": 10, **settings, "refresh_tokens": number % 3 * 4})
        calls.append({"ids": prompt, "n_new": 10, "reuse": "exact_prefix", "publish": False})
        expected.append(case.reference.full(prompt))
    answers = server.concurrently(calls)
    for number, answer in enumerate(answers):
        if number % 2:
            reference = references[server.config.model]
            assert largest_difference(answer, reference, expected[number // 2]) < ROUNDING
        elif not calls[number]["refresh_tokens"]:
            assert answer.report["refreshed_tokens"] == 0
    if server.config.flag("--max-total-tokens", 0) >= 4096:
        # Where memory is tight, donors may have made room.
        assert any(answer.report["refreshed_tokens"] for answer in answers)


@on("llama")
def test_an_abort_amid_refreshing_leaves_nothing_behind(server, references):
    import threading

    for number in range(4):
        prompt, _ = made(server, references, 430 + number, 0.0)
        body = {
            "input_ids": list(prompt),
            "rid": f"gone-{number}",
            "sampling_params": {
                "max_new_tokens": 400,
                "ignore_eos": True,
                "custom_params": {"kvshare": by("none") | {"refresh_tokens": 2}},
            },
        }
        thread = threading.Thread(target=server.post, args=("/generate", body))
        thread.start()
        # Another one that matches the same passages meanwhile.
        server.generate(prompt, 6, refresh_tokens=2, recompute_ratio=0)
        server.abort(f"gone-{number}")
        thread.join(60)
        assert not thread.is_alive()
