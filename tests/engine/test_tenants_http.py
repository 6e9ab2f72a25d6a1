"""Tenants on a real server: who shares, who does not, and every way in that a stranger may try.

Beside each refusal stands what shows that it could have been otherwise.
"""

from __future__ import annotations

import json

import pytest
import requests
from prompts import Book
from server import check_counts, request_body, to_answer
from server_configs import TENANT_SECRET, TENANTS, on
from typer.testing import CliRunner

from sglang_kvshare import cli
from sglang_kvshare.tenants import ENV_SECRET, TenantBook
from sglang_kvshare.verify.checks import verify
from sglang_kvshare.verify.client import VerifyError

pytestmark = [pytest.mark.engine, on("tenants")]

BOOK = TenantBook.read(TENANTS, {ENV_SECRET: TENANT_SECRET})
BY_KEY = ("alice", "mallory", "gina", "operator")


def who(name):
    """The headers that a client of tenant ``name`` sends."""
    return {"Authorization": f"Bearer key-{name}"} if name in BY_KEY else {"X-Tenant": name}


def served(server, name, prompt, n_new=1, **settings):
    return server.generate(prompt, n_new, headers=who(name), recompute_ratio=0, **settings)


def nothing_found(answer, prompt):
    assert answer.counts == (0, 0, 0, len(prompt)), answer.report
    assert answer.report["reason"] == "no_match"
    assert answer.cached == 0


def story(seed):
    """A donor, a prompt that has its passages elsewhere, and one that has them edited: a token in
    twelve is another, so that similar donors alone can serve."""
    book = Book(seed)
    donor, pieces = book.donor([130, 140])
    prompt, _ = book.prompt(pieces[::-1])
    edited = [(t + 1) % 900 if i % 12 == 0 else t for i, t in enumerate(prompt)]
    return donor, prompt, edited


#: (who has cached, who asks, whether they share)
PAIRS = [
    ("alice", "mallory", False),
    ("alice", "gina", False),
    ("alice", "pat", False),
    ("gina", "gus", True),
    ("gus", "gina", True),
    ("gina", "readers", False),
    ("gina", "pat", False),
    ("pat", "pam", True),
    ("pat", "alice", False),
    ("pam", "gus", False),
]


@pytest.mark.parametrize(("owner", "asker", "share"), PAIRS)
def test_a_sharing_class_is_where_reuse_ends(server, owner, asker, share):
    donor, prompt, edited = story(sum(map(ord, owner + asker)))
    served(server, owner, donor)
    for ids in (prompt, edited, donor):
        answer = served(server, asker, ids, publish=False)
        if share:
            assert answer.report["reused_tokens"] + answer.cached > 32, answer.report
        else:
            nothing_found(answer, ids)
    # Positive control: the owner finds all of it, in the same state of the cache.
    assert served(server, owner, prompt, publish=False).report["reused_tokens"] > 200
    assert served(server, owner, edited, publish=False).report["reused_tokens"] > 100
    assert served(server, owner, donor, publish=False).cached > 200


def test_what_a_client_says_of_itself_leads_nowhere(server):
    donor, prompt, _ = story(1)
    served(server, "alice", donor)
    own = BOOK.salt("alice")
    lies = [
        {"cache_salt": own},
        {"cache_salt": own[:32]},
        {"cache_salt": BOOK.public_salt},
        {"cache_salt": "alice"},
        {"extra_key": own},
        {"extra_key": f"{len(own)}:{own};-;-;"},
        {"cache_salt": "", "extra_key": ""},
        {"rid": "HEALTH_CHECK_1"},
        {"session_id": "alice"},
        {"routing_key": "alice"},
        {"lora_path": None, "kv_hints": None},
    ]
    for fields in lies:
        answer = served(server, "mallory", prompt, fields=fields, publish=False)
        nothing_found(answer, prompt)
    for params in (
        {"custom_params": {"kvshare_tenant": "alice"}},
        {"custom_params": {"kvshare_tenant": "alice", "kvshare": {"recompute_ratio": 0}}},
    ):
        answer = server.generate(prompt, 1, headers=who("mallory"), params=params)
        nothing_found(answer, prompt)
        server.flush()
        served(server, "alice", donor)
    for extra in ({"X-Forwarded-For": "127.0.0.1"}, {"X-Tenant ": "alice"}, {"Host": "x/health"}):
        body = request_body(prompt, 1, kvshare={"publish": False})
        try:
            response = server.post("/generate", body, headers={**who("mallory"), **extra})
        except requests.RequestException:
            continue
        assert response.status_code != 200 or to_answer(response.json()).counts[1] == 0
    # Positive control: alice's own salt parts her cache, and her own class joins it.
    nothing_found(served(server, "alice", prompt, fields={"cache_salt": "x"}), prompt)
    assert served(server, "alice", prompt, fields={"cache_salt": ""}).report["reused_tokens"] > 200


def test_batches_and_several_answers_are_each_in_their_domain(server):
    donor, prompt, _ = story(2)
    served(server, "alice", donor)
    body = request_body([], 1, logprobs=False, kvshare={"recompute_ratio": 0, "publish": False})
    shared = body["sampling_params"]
    shapes = [
        {"input_ids": [prompt, prompt]},
        {"input_ids": [prompt, prompt], "sampling_params": [shared, shared]},
        {"input_ids": [prompt, prompt], "cache_salt": ["", ""]},
        {"input_ids": [prompt, prompt], "cache_salt": BOOK.salt("alice")},
        {"input_ids": prompt, "sampling_params": {**shared, "n": 2}},
        {"input_ids": [prompt], "sampling_params": {**shared, "n": 2}},
    ]
    for shape in shapes:
        for name, found in (("mallory", False), ("alice", True)):
            response = server.post("/generate", {**body, **shape}, headers=who(name))
            assert response.status_code == 200, response.text
            answers = [to_answer(each) for each in response.json()]
            assert len(answers) == 2
            for answer in answers:
                check_counts(answer, len(prompt))
                # The answers of one prompt find what the first of them cached, which is theirs.
                shares = answer.counts[0] + answer.counts[1]
                assert (shares > 200) == found or shape["sampling_params"].get("n"), (shape, name)
        server.flush()
        served(server, "alice", donor)


def test_published_passages_are_everybodys_and_nobody_else_publishes(server):
    book = Book(3)
    passage = book.passage(150)
    prompt = [950, 951, *passage, 952, 953, 954]
    for name in ("alice", "pat", "gus"):
        response = publish(server, passage, who(name))
        assert response.status_code == 403, response.text
        assert "operator_keys" in response.text
    nothing_found(served(server, "alice", prompt, publish=False), prompt)
    response = publish(server, passage, who("operator"))
    assert response.status_code == 200, response.text
    told = to_answer(response.json())
    assert told.report["reason"] == "exact_prefix"
    assert told.meta["prompt_tokens"] == len(passage)
    for name in ("alice", "mallory", "gina", "gus", "pat", "readers"):
        answer = served(server, name, prompt, publish=False)
        assert (answer.report["reused_tokens"], answer.cached) == (len(passage), 0), name
        # It is no prefix of theirs: exactness is their own.
        assert served(server, name, passage, publish=False, reuse="exact_prefix").cached == 0
        # What they put behind it stays theirs.
    private = [*passage, *book.passage(60)]
    served(server, "alice", private, reuse="exact_prefix")
    asked = [960, *private, 961]
    assert served(server, "alice", asked, publish=False).report["reused_tokens"] == len(private)
    found = served(server, "mallory", asked, publish=False).report["reused_tokens"]
    assert found == len(passage)
    # With an operator's key alone nothing is answered.
    assert (
        server.post("/generate", request_body(passage, 1), headers=who("operator")).status_code
        == 403
    )


def publish(server, ids, headers, **fields):
    body = request_body(ids, 5, logprobs=False, kvshare={"publish_as": "public"})
    return server.post("/generate", body | fields, headers=headers)


def test_the_command_publishes(server, tmp_path):
    passage = Book(6).passage(120)
    path = tmp_path / "passage.txt"
    path.write_text(" ".join(f"t{token}" for token in passage))

    def run(key):
        words = ["publish", str(path), "--url", server.url, "--key", key]
        return CliRunner().invoke(cli.app, words)

    refused = run("key-alice")
    assert (refused.exit_code, "operator_keys" in refused.stderr) == (1, True), refused.stderr
    assert "published 1 passages, 120 tokens" in run("key-operator").stdout
    asked = [950, *passage, 951, 952]
    assert served(server, "gus", asked, publish=False).report["reused_tokens"] == len(passage)


def test_what_is_wrong_is_named(server):
    ids = Book(4).passage(20)
    for response, named in (
        (publish(server, ids, who("operator"), cache_salt="x"), "cache_salt"),
        (publish(server, ids, who("operator"), extra_key="x"), "extra_key"),
        (post_kvshare(server, ids, {"publish_as": "all"}), "publish_as"),
        (post_session(server, ids, stream=False), "session_params"),
        (post_session(server, ids, stream=True), "session_params"),
    ):
        assert response.status_code == 400, response.text
        assert named in response.text


def post_kvshare(server, ids, kvshare):
    return server.post("/generate", request_body(ids, 1, kvshare=kvshare), headers=who("alice"))


def post_session(server, ids, stream):
    body = request_body(ids, 1) | {"session_params": {"id": "s"}, "stream": stream}
    return server.post("/generate", body, headers=who("alice"))


WORDS = "t1 t2 t3 t4 t5"
SHORT = {"options": {"num_predict": 2}}
CHAT = {"model": "any", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
GENERATE = {"text": WORDS, "sampling_params": {"max_new_tokens": 2}}
COMPLETION = {"model": "any", "prompt": WORDS, "max_tokens": 2}
#: Every entrance that ends in the model: (path, body, what a stranger gets).
ENTRANCES = [
    ("/generate", GENERATE, {403}),
    ("/generate", GENERATE | {"stream": True}, {403}),
    ("/generate", GENERATE | {"text": [WORDS, WORDS]}, {403}),
    ("/v1/completions", COMPLETION, {403}),
    ("/v1/completions", COMPLETION | {"stream": True}, {403}),
    ("/v1/chat/completions", CHAT, {403}),
    ("/v1/chat/completions", CHAT | {"stream": True}, {403}),
    ("/invocations", CHAT, {403}),
    ("/vertex_generate", {"instances": [{"text": WORDS}], "parameters": {}}, {403}),
    ("/api/generate", {"model": "any", "prompt": WORDS, "stream": False} | SHORT, {403}),
    ("/api/chat", CHAT | SHORT | {"stream": False}, {403}),
    ("/v1/messages", CHAT, {403, 400}),
    ("/v1/responses", {"model": "any", "input": WORDS, "max_output_tokens": 2}, {403, 400}),
    ("/v1/score", {"query": WORDS, "items": ["t7"], "label_token_ids": [1], "model": "any"}, {403}),
    ("/v1/embeddings", {"model": "any", "input": WORDS}, {403}),
    ("/encode", {"text": WORDS}, {403}),
    ("/classify", {"text": WORDS}, {403}),
]


@pytest.mark.parametrize(("path", "body", "refused"), ENTRANCES, ids=lambda v: str(v)[:40])
def test_a_stranger_is_refused_at_every_entrance(server, path, body, refused):
    for headers in ({}, {"Authorization": "Bearer nobodys"}, {"X-Tenant": "nobody"}):
        response = server.post(path, body, headers=headers)
        assert response.status_code in refused, (response.status_code, response.text)
        assert "no tenant has this API key" in response.text
    # Positive control: what a tenant is answered, 400 where this model has no answer.
    response = server.post(path, body, headers=who("alice"))
    wanted = 400 if path in ("/v1/embeddings", "/encode", "/classify") else 200
    assert response.status_code == wanted, (response.status_code, response.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "any", "prompt": WORDS, "stream": True}),
        ("/api/chat", CHAT | {"stream": True}),
        ("/v1/messages", CHAT | {"stream": True}),
        ("/v1/responses", {"model": "any", "input": WORDS, "stream": True}),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_stream_that_has_begun_gives_a_stranger_nothing(server, path, body):
    try:
        told = server.post(path, body, timeout=20).text
    except requests.RequestException:
        told = ""
    assert "t" not in told or not any(f'"t{number}' in told for number in range(1000)), told
    assert served(server, "alice", list(range(20))).ids


def test_the_openai_api_keeps_tenants_apart_too(server):
    donor, prompt, _ = story(5)

    def ask(name, ids, **fields):
        body = {"model": "any", "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        body |= {
            "return_cached_tokens_details": True,
            "custom_params": {"kvshare": {"recompute_ratio": 0}, "kvshare_tenant": "alice"},
        }
        response = server.post("/v1/completions", body | fields, headers=who(name))
        assert response.status_code == 200, response.text
        return response.json()["sglext"]["cached_tokens_details"]["kvshare"]

    ask("alice", donor)
    assert ask("mallory", prompt, cache_salt=BOOK.salt("alice"))["reused_tokens"] == 0
    assert ask("alice", prompt)["reused_tokens"] > 200


def test_a_tenant_verifies_its_own_reuse(server):
    found = verify(server.url, api_key="key-alice", passage_tokens=200)
    assert found.ok, found.checks
    with pytest.raises(VerifyError, match="another key"):
        verify(server.url, api_key="nobodys", passage_tokens=200)


def test_anthropics_clients_send_their_key_elsewhere(server):
    assert server.post("/v1/messages", CHAT, headers={"x-api-key": "key-alice"}).status_code == 200
    assert server.post("/v1/messages", CHAT, headers={"x-api-key": "nobodys"}).status_code in (
        400,
        403,
    )


def test_health_needs_no_key_and_nobody_sees_the_secret(server):
    for path in ("/health", "/health_generate"):
        assert requests.get(server.url + path, timeout=60).status_code == 200
    shown = server.log() + requests.get(server.url + "/metrics", timeout=30).text
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_internal_state"):
        shown += requests.get(
            server.url + path, timeout=30, headers={"Authorization": "Bearer key-admin"}
        ).text
    assert "kvshare-tenants" in shown or str(TENANTS) in shown
    assert TENANT_SECRET not in shown
    assert json.dumps(TENANT_SECRET) not in shown
