"""`kvshare tree` and `kvshare forget` against a server that is not there, or says this and that."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from sglang_kvshare import cli

pytestmark = pytest.mark.unit

COUNTS = {
    "removed_tokens": 1200,
    "removed_nodes": 3,
    "of_others_tokens": 0,
    "overwritten": True,
    "left_in_tree": 0,
    "left_in_index": 0,
    "left_windows": 0,
    "running_requests": 0,
    "left_in_running_requests": 0,
    "ranks_agree": True,
}


@pytest.fixture
def server():
    """Answers each request with ``(status, body)`` of its path and remembers what it was asked."""
    answers: dict[str, tuple[int, str]] = {}
    asked: list[tuple[str, str | None, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            asked.append((self.path, self.headers.get("Authorization"), self.rfile.read(length)))
            status, body = answers.get(self.path.partition("?")[0], (404, "{}"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *args):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    http.answers, http.asked = answers, asked
    http.url = f"http://127.0.0.1:{http.server_port}"
    yield http
    http.shutdown()
    http.server_close()


def run(*args, **env):
    names = ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY")
    done = CliRunner().invoke(cli.app, list(args), env=dict.fromkeys(names) | env)
    return done.exit_code, done.stdout, done.stderr


def forgotten(left=0, **changes):
    one = COUNTS | changes
    return json.dumps({"tenant": "alice", "left_tokens": left, "replicas": [one]})


def test_the_tree_goes_to_the_screen_or_into_a_file(server, tmp_path):
    server.answers["/kvshare/tree"] = (200, "a tree\n")
    assert run("tree", server.url, "--namespace", "a b&c") == (0, "a tree\n", "")
    out = tmp_path / "tree.svg"
    assert run("tree", server.url, "--format", "svg", "--out", str(out), "--nodes", "9")[0] == 0
    assert out.read_text() == "a tree\n"
    assert [path for path, _, _ in server.asked] == [
        "/kvshare/tree?format=text&nodes=2000&namespace=a+b%26c",
        "/kvshare/tree?format=svg&nodes=9",
    ]
    code, _, err = run("tree", server.url, "--out", str(tmp_path / "no" / "folder"))
    assert code == 1
    assert err.startswith("kvshare: ")


def test_the_key_comes_from_the_option_or_the_environment(server):
    server.answers["/kvshare/tree"] = (200, "")
    run("tree", server.url)
    run("tree", server.url, SGLANG_API_KEY="k")
    run("tree", server.url, SGLANG_API_KEY="k", SGLANG_ADMIN_API_KEY="admin")
    run("tree", server.url, "--api-key", "given", SGLANG_ADMIN_API_KEY="admin")
    assert [key for _, key, _ in server.asked] == [
        *(None, "Bearer k", "Bearer admin", "Bearer given"),
    ]


def test_forgetting_says_what_was_removed_and_that_nothing_is_left(server):
    server.answers["/kvshare/forget"] = (200, forgotten())
    code, out, _ = run("forget", server.url, "alice")
    assert code == 0
    assert out.splitlines()[0] == "removed 1,200 tokens in 3 nodes; overwritten with zeros"
    assert out.splitlines()[-1] == "Nothing of 'alice' is left."
    assert json.loads(server.asked[-1][2]) == {"tenant": "alice"}
    code, out, _ = run("forget", server.url, "alice", "--json")
    assert (code, json.loads(out)["left_tokens"]) == (0, 0)


def test_forgetting_fails_while_something_is_left(server):
    server.answers["/kvshare/forget"] = (
        200,
        forgotten(40, left_in_tree=40, of_others_tokens=7, ranks_agree=False),
    )
    code, out, _ = run("forget", server.url, "alice")
    assert code == 1
    assert "finds 40 tokens in the tree" in out
    assert "7 of them others' text" in out
    assert "RANKS DO NOT AGREE" in out
    assert "ask again" in out
    assert run("forget", server.url, "alice", "--json")[0] == 1


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "{}", "asks for its admin key"),
        (403, '{"error": {"message": "needs --admin-api-key"}}', "needs --admin-api-key"),
        (400, '{"error": {"message": "allowed are a, b"}}', "allowed are a, b"),
        (404, "", "no SGLang server with KVShare"),
        (500, "<html>", "answered 500"),
        (200, "[]", "something else than counts"),
    ],
)
def test_a_refusal_is_one_sentence(server, status, body, said):
    server.answers["/kvshare/forget"] = (status, body)
    code, out, err = run("forget", server.url, "alice")
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:1", "no-such-host.invalid", "ftp://x", "http://["])
def test_no_server_is_one_sentence(url):
    code, _, err = run("tree", url)
    assert code == 1
    assert len(err.splitlines()) == 1
