"""The operator's routes: who may ask, what is refused, and what a server answers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from prompts import Book
from server import request_body
from server_configs import on
from typer.testing import CliRunner

pytestmark = pytest.mark.engine

PICTURE = {
    **{"pool_tokens": 100, "tokens": 3, "nodes_in_tree": 1, "indexed_tokens": 3, "took_ms": 0.1},
    "namespaces": [{"name": "default", "tenants": []}],
    "nodes": [{"id": 1, "parent": None, "namespace": "default", "start": 0, "tokens": 3}],
    "ranks_agree": True,
}


def client(monkeypatch, ask=None, *, api_key=None, admin_api_key=None, tenants=""):
    """The routes as SGLang's own server protects them, with ``ask`` for its schedulers."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils.auth import add_api_key_middleware

    from sglang_kvshare.engine import admin_routes

    async def answer(question):
        return [PICTURE] if question["what"] == "tree" else [{"left_tokens": 0}]

    app = FastAPI()
    admin_routes.add_routes(app, ask or answer)
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    monkeypatch.setattr(admin_routes, "active_config", lambda: SimpleNamespace(tenants=tenants))
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_serving",
        lambda: SimpleNamespace(admin_api_key=admin_api_key),
    )
    return TestClient(app)


def codes(asker, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return (
        asker.get("/kvshare/tree", headers=headers).status_code,
        asker.post("/kvshare/forget", json={"tenant": "a"}, headers=headers).status_code,
    )


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize(
    ("keys", "tenants", "given", "code"),
    [
        # As SGLang's own: open without keys, the admin key before the API key.
        ({}, "", None, 200),
        ({"api_key": "k"}, "", None, 401),
        ({"api_key": "k"}, "", "k", 200),
        ({"admin_api_key": "A"}, "", None, 401),
        ({"admin_api_key": "A"}, "", "A", 200),
        ({"api_key": "k", "admin_api_key": "A"}, "", "k", 401),
        ({"api_key": "k", "admin_api_key": "A"}, "", "A", 200),
        # With tenants nobody but the operator.
        ({}, "tenants.yaml", None, 403),
        ({"api_key": "k"}, "tenants.yaml", "k", 403),
        ({"admin_api_key": "A"}, "tenants.yaml", "k", 401),
        ({"admin_api_key": "A"}, "tenants.yaml", "A", 200),
    ],
)
def test_who_may_ask(monkeypatch, keys, tenants, given, code):
    assert codes(client(monkeypatch, tenants=tenants, **keys), given) == (code, code)


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("format=png", "format='png': allowed are text, json, svg, html"),
        ("nodes=0", "nodes='0': allowed are whole numbers from 1 to 20000"),
        ("nodes=many", "nodes='many'"),
        ("replica=1", "replica='1': allowed are whole numbers from 0 to 0"),
        ("tenant=a", "unknown field 'tenant': allowed are format, namespace, nodes, replica"),
    ],
)
def test_a_bad_query_is_refused_with_what_is_allowed(monkeypatch, query, said):
    answer = client(monkeypatch).get("/kvshare/tree?" + query)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.usefixtures("sglang_cpu")
@pytest.mark.parametrize("body", ["", "[]", "{}", '{"tenant": 5}', '{"tenant": "a", "all": true}'])
def test_a_bad_body_is_refused(monkeypatch, body):
    answer = client(monkeypatch).post("/kvshare/forget", content=body)
    assert answer.status_code == 400
    assert "tenant" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("sglang_cpu")
def test_what_the_schedulers_say_comes_through(monkeypatch):
    asked = []

    async def ask(question):
        asked.append(question)
        if question.get("tenant") == "nobody":
            return [{"error": "tenant='nobody': allowed are a", "status": 400}]
        if question.get("namespace") == "broken":
            return [{"error": "KeyError: 5", "status": 500}]
        return [PICTURE] if question["what"] == "tree" else [{"left_tokens": 2}, {"left_tokens": 3}]

    asker = client(monkeypatch, ask)
    refused = asker.post("/kvshare/forget", json={"tenant": "nobody"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "tenant='nobody': allowed are a",
    )
    assert asker.get("/kvshare/tree?namespace=broken").status_code == 500
    assert asker.post("/kvshare/forget", json={"tenant": "a"}).json()["left_tokens"] == 5
    for form, media in (
        ("text", "text/plain"),
        ("json", "application/json"),
        ("svg", "image/svg+xml"),
        ("html", "text/html"),
    ):
        told = asker.get(f"/kvshare/tree?format={form}&nodes=7")
        assert told.status_code == 200
        assert told.headers["content-type"].startswith(media)
        assert "script-src" not in told.headers["content-security-policy"]
    assert (asked[-1]["most"], asked[-1]["namespace"]) == (7, None)


@pytest.mark.usefixtures("sglang_cpu")
def test_a_scheduler_that_is_silent_is_given_up(monkeypatch):
    import asyncio

    from sglang_kvshare.engine import admin_routes

    async def ask(question):
        return await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    assert client(monkeypatch, ask).get("/kvshare/tree").status_code == 503
    assert admin_routes.PATIENCE_S > 10


@on("llama")
def test_a_server_shows_its_tree(server, tmp_path):
    import requests

    from sglang_kvshare import cli
    from sglang_kvshare.treeview import TreePicture

    book = Book(61)
    donor, pieces = book.donor([40, 40])
    server.generate(donor, 1, fields={"cache_salt": "hidden-salt"})
    prompt, _ = book.prompt(pieces[::-1])
    reused = server.generate(prompt, 1, fields={"cache_salt": "hidden-salt"}, recompute_ratio=0)
    assert reused.report["reused_tokens"] > 0
    server.generate(donor, 1)
    url = server.url + "/kvshare/tree"
    told = requests.get(url, params={"format": "json"}, timeout=60)
    assert told.status_code == 200, told.text
    assert "hidden-salt" not in told.text
    picture = TreePicture.from_json(told.text)
    assert picture.ranks_agree
    assert len(picture.namespaces) == 2
    assert {node.depth for node in picture.nodes} == {0, 1}
    assert picture.tokens >= 2 * len(donor) + reused.report["reused_tokens"]
    assert picture.tokens == sum(node.tokens for node in picture.nodes)
    default = requests.get(
        url, params={"format": "json", "namespace": "default"}, timeout=60
    ).json()
    assert sum(node["tokens"] for node in default["nodes"]) == len(donor) // 1
    for form, begin in (("text", ""), ("svg", "<svg"), ("html", "<!DOCTYPE html>")):
        out = tmp_path / form
        done = CliRunner().invoke(
            cli.app, ["tree", server.url, "--format", form, "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        assert out.read_text().startswith(begin)
        assert "hidden-salt" not in out.read_text()
    for params, said in (
        ({"format": "png"}, "allowed are text, json, svg, html"),
        ({"namespace": "nobody"}, "allowed are"),
    ):
        refused = requests.get(url, params=params, timeout=60)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    # SGLang's own message of this kind is answered as before.
    assert requests.get(server.url + "/server_info", timeout=60).json()["internal_states"]
    done = CliRunner().invoke(cli.app, ["forget", server.url, "nobody"])
    assert done.exit_code == 1
    assert "'nobody': allowed are none" in done.stderr
    # While requests run the answer comes between two of their steps.
    long = server.post("/generate", request_body(prompt, 4), timeout=60)
    assert long.status_code == 200
    assert json.loads(requests.get(url, params={"format": "json"}, timeout=60).text)["nodes"]
