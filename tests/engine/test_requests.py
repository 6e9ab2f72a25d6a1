"""What one request may ask for and what it is told: modes, counts, bad values, logprobs."""

from __future__ import annotations

import json

import pytest
import requests
from comparing import difference, expected_spared, largest_difference, narrow_layer
from prompts import Book, cached_part
from server import check_counts, request_body, to_answer
from server_configs import on

pytestmark = pytest.mark.engine

ROUNDING = 1e-4


def serve_donor(server, book, lengths=(80, 60), **settings):
    donor, pieces = book.donor(list(lengths))
    server.generate(donor, 1, logprobs=False, **settings)
    return donor, pieces


@on("llama", "mistral")
def test_off_takes_nothing_not_even_a_prefix(server, references):
    reference = references[server.config.model]
    donor, pieces = serve_donor(server, Book(21), lengths=(80, 130))
    prompt, _ = Book(22).prompt(pieces[::-1])
    for ids in (donor, prompt):
        answer = server.generate(ids, 8, reuse="off")
        assert answer.cached == 0
        assert answer.counts == (0, 0, 0, len(ids))
        assert (answer.report["decision"], answer.report["reason"]) == ("none", "off")
        assert largest_difference(answer, reference, reference.full(ids)) < ROUNDING
    # It gives, though: what it computed is exact.
    later = server.generate(prompt, 1, reuse="exact_prefix")
    page = server.config.page_size
    assert later.report["prefix_tokens"] == (len(prompt) - 1) // page * page


@on("llama", "qwen3")
def test_exact_prefix_is_stock_behaviour(server, references):
    reference = references[server.config.model]
    donor, pieces = serve_donor(server, Book(23))
    prompt, _ = Book(24).prompt(pieces[::-1])
    page = server.config.page_size
    answer = server.generate(prompt, 8, reuse="exact_prefix")
    assert answer.counts == (0, 0, 0, len(prompt))
    assert (answer.report["decision"], answer.report["reason"]) == ("none", "exact_prefix")
    longer = [*donor, *prompt]
    answer = server.generate(longer, 8, reuse="exact_prefix")
    prefix = len(donor) // page * page
    assert answer.counts == (prefix, 0, 0, len(longer) - prefix)
    assert largest_difference(answer, reference, reference.full(longer)) < ROUNDING


@on("llama")
def test_matching_has_no_side_effects(server):
    """Refused or small plans, asked five times, leave nothing behind that changes the next one."""
    _, pieces = serve_donor(server, Book(25))
    prompt, matches = Book(26).prompt(pieces[::-1])
    for _ in range(5):
        # An answer with prompt log-probabilities takes the same path up to the plan.
        server.generate(prompt[:20], 1, recompute_ratio=0)
    first = server.generate(prompt, 4, recompute_ratio=0)
    again = server.generate(prompt, 4, recompute_ratio=0)
    assert first.report["reused_tokens"] == sum(m.length for m in matches)
    # The second finds the exact part of the first, which is the glue before its first span, and
    # behind it the branch that the first has published.
    assert again.report["prefix_tokens"] == matches[0].start
    assert again.report["reused_tokens"] == len(prompt) - 1 - matches[0].start
    assert difference(first, again) < ROUNDING


@on("llama")
def test_prompt_logprobs_are_exact_and_say_why_nothing_was_reused(server):
    donor, pieces = serve_donor(server, Book(27))
    prompt, _ = Book(28).prompt(pieces[::-1])
    prompt = [*donor[:30], *prompt]
    for start in (0, 10, len(prompt) - 2):
        answer = server.generate(prompt, 8, logprob_start_len=start)
        assert (answer.report["decision"], answer.report["reason"]) == ("none", "prompt_logprobs")
        assert answer.counts[1:3] == (0, 0)
        assert answer.report["prefix_tokens"] <= start
        server.flush()
        cold = server.generate(prompt, 8, logprob_start_len=start, reuse="off")
        assert difference(answer, cold) < ROUNDING
        assert len(answer.input_logprobs) == len(cold.input_logprobs) == len(prompt) - start
        for warm, exact in zip(answer.input_logprobs, cold.input_logprobs, strict=True):
            assert (warm is None) == (exact is None)
            assert warm is None or abs(warm - exact) < ROUNDING
        server.generate(donor, 1, logprobs=False)


@on("llama", "qwen3")
def test_the_last_token_s_logprob_does_not_prevent_reuse(server):
    _, pieces = serve_donor(server, Book(29))
    prompt, _ = Book(30).prompt(pieces[::-1])
    answer = server.generate(prompt, 8, logprob_start_len=len(prompt) - 1)
    assert answer.report["reused_tokens"] > 0
    assert len(answer.input_logprobs) == 1
    # Log-probabilities of tokens chosen by the client take another way through the logits.
    wanted = list(answer.top[0])[:3]
    again = server.generate(prompt, 1, fields={"token_ids_logprob": wanted})
    (given,) = again.meta["output_token_ids_logprobs"]
    for logprob, token, _ in given:
        assert abs(again.top[0][token] - logprob) < ROUNDING


@on("llama", "qwen3")
def test_prompt_logprobs_rest_on_reused_values_where_that_is_asked_for(server, references):
    """The rows whose logits are wanted are computed; what lies before them is reused, and chosen,
    as for the prompt that ends where they begin."""
    reference = references[server.config.model]
    _, pieces = serve_donor(server, Book(134))
    book = Book(135)
    prompt, matches = book.prompt(pieces[::-1])
    # The answer repeats a passage, so that a plan that looks too far would reuse part of it.
    scored = [*book.passage(4), *pieces[0].tokens()[:40]]
    start = len(prompt) - 1
    alone = server.generate(prompt, 1, recompute_ratio=0.3, publish=False)
    answer = server.generate(
        [*prompt, *scored],
        1,
        recompute_ratio=0.3,
        publish=False,
        approximate_logprobs=True,
        logprob_start_len=start,
        fields={"token_ids_logprob": [7, 70, 700]},
    )
    served = cached_part(matches, server.config.page_size)
    spared = expected_spared(server, served, len(prompt), 0.3)
    assert answer.report["reused_tokens"] == alone.report["reused_tokens"] == len(spared) > 0
    assert answer.report["new_tokens"] == alone.report["new_tokens"] + len(scored)
    assert len(answer.input_logprobs) == len(scored) + 1
    row = reference.approximate(prompt, spared, narrow_layer(server))
    exact = reference.all_logprobs([*prompt, *scored])
    given = answer.meta["input_token_ids_logprobs"]
    furthest = 0.0
    for index, token in enumerate(scored):
        expected = row.logprobs()
        assert abs(answer.input_logprobs[index + 1] - float(expected[token])) < ROUNDING
        for logprob, wanted, _ in given[index + 1]:
            assert abs(logprob - float(expected[wanted])) < ROUNDING
        furthest = max(furthest, float((exact[start + index] - expected).abs().max()))
        reference.decode(row, token)
    # Positive control: the approximation does show.
    assert furthest > 10 * ROUNDING


@on("llama", "qwen3")
def test_what_is_not_published_serves_nobody(server):
    book = Book(136)
    prompt = book.passage(90)
    longer = [*book.passage(3), *prompt]
    server.generate(prompt, 4, publish=False)
    for ids in (prompt, longer):
        answer = server.generate(ids, 4, publish=False, recompute_ratio=0)
        assert answer.counts == (0, 0, 0, len(ids))
    # Positive control: what is published serves, as prefix and at another place.
    server.generate(prompt, 4)
    assert server.generate(prompt, 4, publish=False).cached >= 64
    moved = server.generate(longer, 4, publish=False, recompute_ratio=0)
    assert moved.report["reused_tokens"] >= 64
    # Nor does a request that took what others published leave anything of its own.
    again = server.generate(longer, 4, publish=False, recompute_ratio=0)
    assert again.counts == moved.counts


@on("installed")
def test_a_server_without_the_flag_has_no_report(server):
    answer = server.generate(Book(31).passage(40), 4)
    assert "kvshare" not in (answer.meta.get("cached_tokens_details") or {})


@on("qwen2")
def test_a_plan_that_spares_too_little_is_dropped(server):
    """`--kvshare-min-saved-tokens 1` here: below it is only a plan that spares nothing."""
    _, pieces = serve_donor(server, Book(32), lengths=(16,))
    book = Book(33)
    prompt, _ = book.prompt(pieces, question=9)
    # 16 tokens matched, of which ceil(0.99 * 16) = 16 are recomputed.
    answer = server.generate(prompt, 4, recompute_ratio=0.99)
    assert answer.counts == (0, 0, 0, len(prompt))
    assert (answer.report["decision"], answer.report["reason"]) == ("none", "below_minimum")
    prompt, _ = book.prompt(pieces, question=9)
    assert server.generate(prompt, 4, recompute_ratio=0).report["decision"] == "reuse"


@on("llama")
def test_no_match_is_said(server):
    answer = server.generate(Book(34).passage(60), 2)
    assert (answer.report["decision"], answer.report["reason"]) == ("none", "no_match")
    # A run one token shorter than `min_run_tokens` is none.
    passage = Book(34).passage(60)[20:35]
    answer = server.generate([950, *passage, 951], 2, recompute_ratio=0)
    assert answer.counts == (0, 0, 0, 17)
    answer = server.generate([952, *Book(34).passage(60)[20:36], 953], 2, recompute_ratio=0)
    assert answer.counts == (0, 16, 0, 2)


@on("llama")
def test_one_token_prompts_and_the_shortest_answers(server):
    for ids in ([5], [6, 7]):
        assert server.generate(ids, 1).counts == (0, 0, 0, len(ids))
    _, pieces = serve_donor(server, Book(35))
    prompt, matches = Book(36).prompt(pieces[::-1])
    # Nothing is generated: the prompt is computed for its own sake.
    response = server.post("/generate", request_body(prompt, 0, kvshare={"recompute_ratio": 0}))
    assert response.status_code == 200, response.text
    answer = to_answer(response.json())
    check_counts(answer, len(prompt))
    assert answer.report["reused_tokens"] in (0, sum(m.length for m in matches))


@on("llama")
def test_parallel_samples_each_have_a_report(server):
    _, pieces = serve_donor(server, Book(37))
    prompt, _ = Book(38).prompt(pieces[::-1])
    body = request_body(prompt, 4, params={"n": 3}, kvshare={"recompute_ratio": 0})
    answers = [to_answer(data) for data in server.post("/generate", body).json()]
    assert len({answer.ids for answer in answers}) == 1
    for answer in answers:
        check_counts(answer, len(prompt))


@on("llama")
def test_a_stream_ends_with_the_report(server):
    _, pieces = serve_donor(server, Book(39))
    prompt, matches = Book(40).prompt(pieces[::-1])
    body = request_body(prompt, 6, kvshare={"recompute_ratio": 0}) | {"stream": True}
    response = requests.post(server.url + "/generate", json=body, stream=True, timeout=60)
    assert response.status_code == 200
    lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    last = to_answer(json.loads(lines[-2]))
    assert last.report["reused_tokens"] == sum(m.length for m in matches)


BAD = [
    ({"reuse": "sometimes"}, "reuse", ["off", "exact_prefix", "approximate"]),
    ({"reuse": None}, "reuse", ["off", "exact_prefix", "approximate"]),
    ({"reuse": True}, "reuse", ["off", "exact_prefix", "approximate"]),
    ({"reuse": ["off"]}, "reuse", ["off", "exact_prefix", "approximate"]),
    ({"recompute_ratio": 1.5}, "recompute_ratio", ["0 to 1"]),
    ({"recompute_ratio": -0.01}, "recompute_ratio", ["0 to 1"]),
    ({"recompute_ratio": "0.5"}, "recompute_ratio", ["0 to 1"]),
    ({"recompute_ratio": True}, "recompute_ratio", ["0 to 1"]),
    ({"recompute_ratio": None}, "recompute_ratio", ["0 to 1"]),
    ({"selector": "best"}, "selector", ["seams"]),
    ({"selector": 3}, "selector", ["seams"]),
    ({"publish": "no"}, "publish", ["true and false"]),
    ({"approximate_logprobs": 1}, "approximate_logprobs", ["true and false"]),
    ({"ttft_slo_ms": -5}, "ttft_slo_ms", ["above 0"]),
    ({"tbt_slo_ms": "soon"}, "tbt_slo_ms", ["above 0"]),
    ({"recompute_ration": 0.5}, "recompute_ration", ["recompute_ratio"]),
    ("off", "kvshare", ["object"]),
    (["off"], "kvshare", ["object"]),
    (False, "kvshare", ["object"]),
    ("", "kvshare", ["object"]),
]


@pytest.mark.parametrize("how", ["single", "stream", "batch", "one_of_a_batch"])
@on("llama")
def test_a_bad_value_is_http_400_with_the_field_and_what_is_allowed(server, how):
    for value, field, allowed in BAD:
        body = request_body([1, 2, 3], 2)
        body["sampling_params"]["custom_params"] = {"kvshare": value}
        if how == "stream":
            body["stream"] = True
        if "batch" in how:
            body["input_ids"] = [[1, 2, 3], [4, 5, 6]]
        if how == "one_of_a_batch":
            bad = body["sampling_params"]
            body["sampling_params"] = [{**bad, "custom_params": {}}, bad]
        response = server.post("/generate", body, timeout=30)
        assert response.status_code == 400, (value, response.status_code, response.text)
        assert field in response.text, (value, response.text)
        for word in allowed:
            assert word in response.text, (value, response.text)
        assert "Traceback" not in response.text
    # The server goes on.
    assert server.generate([1, 2, 3], 2).counts == (0, 0, 0, 3)


@pytest.mark.parametrize("stream", [False, True])
@on("llama")
def test_not_a_number_is_http_400(server, stream):
    body = request_body([1, 2, 3], 2) | {"stream": stream}
    for text in ("NaN", "Infinity", "1e999"):
        body["sampling_params"]["custom_params"] = {"kvshare": {"recompute_ratio": "@"}}
        response = requests.post(
            server.url + "/generate",
            data=json.dumps(body).replace('"@"', text),
            headers={"Content-Type": "application/json"},
            timeout=30,
        )
        # SGLang's JSON parser may refuse it before anybody sees it.
        assert 400 <= response.status_code < 500, (text, response.status_code, response.text)


@pytest.mark.parametrize("stream", [False, True])
@on("installed", "llama")
def test_custom_params_that_are_no_object_cost_no_server_error(server, stream):
    for value in ("off", ["kvshare"], 7, True):
        body = request_body([1, 2, 3], 2) | {"stream": stream}
        body["sampling_params"]["custom_params"] = value
        response = server.post("/generate", body, timeout=30)
        assert response.status_code in (200, 400), (value, response.status_code, response.text)
        assert "no attribute" not in response.text, (value, response.text)
        if server.config.kvshare and response.status_code == 400:
            assert "custom_params" in response.text, (value, response.text)
    assert len(server.generate([1, 2, 3], 2).ids) == 2


@on("llama")
def test_other_custom_params_pass_through(server):
    body = request_body([1, 2, 3], 2)
    body["sampling_params"]["custom_params"] = {"mine": {"reuse": "sometimes"}}
    assert server.post("/generate", body).status_code == 200
    body["sampling_params"]["custom_params"] = {"kvshare": None, "mine": 1}
    assert server.post("/generate", body).status_code == 200
