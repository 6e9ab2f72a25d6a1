"""A real server on a real model: what a user sees, in both APIs."""

from __future__ import annotations

import json
import random

import pytest
import requests

from kvshare_eval.passages import build_prompt, load_passages

pytestmark = [pytest.mark.e2e]
PROMPTS = 50


@pytest.fixture(scope="module")
def texts():
    """50 prompts over real passages, two of them each, and the donors that hold them all."""
    rng = random.Random(7)
    passages = load_passages()
    donors = [
        build_prompt(passages[start : start + 5], passages[start].questions[0])
        for start in range(0, len(passages), 5)
    ]
    prompts = []
    for number in range(PROMPTS):
        chosen = rng.sample(passages, 2)
        # A word of its own in front keeps the prompts from sharing prefixes.
        text = build_prompt(chosen, rng.choice(chosen).questions[number % 3])
        prompts.append(f"Request {number}. {text}")
    return donors, prompts


def ids(tokenizer, text):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def generate(server, batch, tokens, **settings):
    body = {
        "input_ids": batch,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "custom_params": {"kvshare": settings},
        },
        "return_logprob": True,
    }
    response = requests.post(server.url + "/generate", json=body, timeout=900)
    response.raise_for_status()
    return response.json()


def report(answer):
    return answer["meta_info"]["cached_tokens_details"]["kvshare"]


def logprobs(answer):
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def assert_sums(answer):
    counts = report(answer)
    total = sum(
        counts[name]
        for name in ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
    )
    assert total == answer["meta_info"]["prompt_tokens"]
    assert counts["new_tokens"] >= 1


def flush(server):
    requests.post(server.url + "/flush_cache", timeout=60).raise_for_status()


@pytest.mark.slow
def test_ratio_one_equals_no_reuse_over_fifty_real_prompts(server, tokenizer, texts):
    donors, prompts = ([ids(tokenizer, text) for text in group] for group in texts)
    flush(server)
    expected = generate(server, prompts, 8, reuse="off")
    flush(server)
    generate(server, donors, 1)
    found = generate(server, prompts, 8, recompute_ratio=1)
    worst = 0.0
    for full, all_rows in zip(expected, found, strict=True):
        assert report(full)["reason"] == "off"
        assert report(all_rows)["decision"] == "reuse"
        assert report(all_rows)["recomputed_tokens"] > 200
        assert report(all_rows)["reused_tokens"] == 0
        assert_sums(all_rows)
        assert all_rows["output_ids"] == full["output_ids"]
        pairs = zip(logprobs(full), logprobs(all_rows), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst < 1e-4


def test_every_passage_is_a_hit_and_the_answer_stays_sensible(server, tokenizer, texts):
    donors, prompts = ([ids(tokenizer, text) for text in group] for group in texts)
    flush(server)
    generate(server, donors, 1)
    for ratio in (0, None):
        settings = {} if ratio is None else {"recompute_ratio": ratio}
        (answer,) = generate(server, prompts[:1], 8, **settings)
        counts = report(answer)
        assert_sums(answer)
        assert counts["decision"] == "reuse"
        matched = counts["reused_tokens"] + counts["recomputed_tokens"]
        assert matched > 0.75 * answer["meta_info"]["prompt_tokens"]
        assert (counts["recomputed_tokens"] == 0) is (ratio == 0)
    (full,) = generate(server, prompts[:1], 8, reuse="off")
    (nothing,) = generate(server, prompts[1:2], 8, reuse="off")
    # The reused answer's first token is as likely as in full, give or take; another prompt's is
    # the control.
    assert abs(logprobs(answer)[0] - logprobs(full)[0]) < 1.5
    assert report(nothing)["prefix_tokens"] == 0


def test_the_same_prompt_twice_is_an_exact_prefix(server, tokenizer, texts):
    prompt = ids(tokenizer, texts[0][0])
    flush(server)
    (first,) = generate(server, [prompt], 4)
    (second,) = generate(server, [prompt], 4)
    assert report(second)["prefix_tokens"] == len(prompt) - 1
    assert report(second)["reason"] == "prefix_covers_prompt"
    assert second["output_ids"] == first["output_ids"]


def chat(server, text, **fields):
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        "return_cached_tokens_details": True,
        **fields,
    }
    return requests.post(server.url + "/v1/chat/completions", json=body, timeout=300)


def test_the_openai_api_reuses_reports_and_refuses(server, texts):
    donors, prompts = texts
    flush(server)
    first = chat(server, donors[0])
    assert first.json()["sglext"]["cached_tokens_details"]["kvshare"]["reason"] == "no_match"
    for donor in donors[1:]:
        chat(server, donor, max_tokens=1)
    counts = chat(server, prompts[0]).json()["sglext"]["cached_tokens_details"]["kvshare"]
    assert counts["decision"] == "reuse"
    assert counts["reused_tokens"] > 300
    off = chat(server, prompts[1], custom_params={"kvshare": {"reuse": "off"}}).json()
    assert off["sglext"]["cached_tokens_details"]["kvshare"]["reason"] == "off"
    plain = chat(server, prompts[2], return_cached_tokens_details=False).json()
    assert "sglext" not in plain
    for stream in (False, True):
        refused = chat(
            server, prompts[3], stream=stream, custom_params={"kvshare": {"reuse": "often"}}
        )
        assert refused.status_code == 400
        assert "kvshare.reuse='often'" in refused.json()["message"]
        assert "off, exact_prefix, approximate" in refused.json()["message"]


def test_an_openai_stream_carries_the_report(server, texts):
    response = chat(server, texts[1][4], stream=True)
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    details = [chunk["sglext"] for chunk in chunks if chunk.get("sglext")]
    assert details
    assert "decision" in details[-1]["cached_tokens_details"]["kvshare"]


def test_tenants_are_apart_and_one_tenant_reuses(server, texts):
    donors, prompts = texts
    flush(server)
    for donor in donors:
        chat(server, donor, max_tokens=1, cache_salt="tenant-1")

    def counts(**fields):
        answer = chat(server, prompts[0], **fields).json()
        return answer["sglext"]["cached_tokens_details"]["kvshare"]

    for other in ({}, {"cache_salt": "tenant-2"}, {"cache_salt": "tenant-1", "extra_key": "x"}):
        foreign = counts(**other)
        assert foreign["reused_tokens"] == foreign["prefix_tokens"] == 0, other
        flushed = foreign["recomputed_tokens"]
        assert flushed == 0
    assert counts(cache_salt="tenant-1")["reused_tokens"] > 300
