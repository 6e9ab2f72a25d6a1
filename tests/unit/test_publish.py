"""`kvshare publish`, against servers that answer as SGLang does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_kvshare import cli
from sglang_kvshare.publish import PublishError, passages_in

pytestmark = pytest.mark.unit


@contextmanager
def answering(status: int, body: Any) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that says one thing; its address, and what it was asked: key and body."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["Authorization"], sent))
            told = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def run(*args: object, key: str = "op") -> tuple[int, str, str]:
    result = CliRunner().invoke(
        cli.app, ["publish", *map(str, args)], env={"KVSHARE_OPERATOR_KEY": key}
    )
    return result.exit_code, result.stdout, result.stderr


def meta(**details: Any) -> Any:
    return {"meta_info": {"prompt_tokens": 7, "cached_tokens_details": details}}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_text("A passage.\nOf two lines.")
    (tmp_path / "b.jsonl").write_text('{"text": "One."}\n\n{"text": "Two.", "id": 2}\n')
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def test_a_file_is_a_passage_and_so_is_a_line(files: list[Path]) -> None:
    with answering(200, meta(kvshare={"new_tokens": 7})) as (url, asked):
        code, out, err = run(*files, "--url", url)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{files[0]}  7 tokens",
        f"{files[1]}:1  7 tokens",
        f"{files[1]}:3  7 tokens",
        "published 3 passages, 21 tokens",
    ]
    texts = ["A passage.\nOf two lines.", "One.", "Two."]
    assert [body["text"] for _, body in asked] == texts
    for key, body in asked:
        assert key == "Bearer op"
        assert body["sampling_params"]["custom_params"] == {"kvshare": {"publish_as": "public"}}


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (403, {"error": {"message": "publish_as needs operator_keys"}}, "needs operator_keys"),
        (401, {"error": "Unauthorized"}, "asks for another key"),
        (400, {"error": {"message": "tells no tenants apart"}}, "tells no tenants apart"),
        (200, meta(device=0), "without KVShare"),
        (
            200,
            {"meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}},
            "too long",
        ),
    ],
    ids=["no operator", "SGLang's key", "no tenants", "stock", "aborted"],
)
def test_what_was_not_published_is_said(files, status, body, said) -> None:
    with answering(status, body) as (url, asked):
        code, out, err = run(*files, "--url", url)
    assert (code, out, len(asked)) == (1, "", 1)
    assert said in err
    assert "\n" not in err.strip()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\xff", "cannot be read"),
        ("a.jsonl", b'{"text": "fine"}\n[1]', "a.jsonl:2"),
        ("a.jsonl", b"not json", "a.jsonl:1"),
        ("a.jsonl", b'{"text": 5}', "empty, or no text"),
        ("absent/a.txt", None, "cannot be read"),
    ],
)
def test_files_are_read_before_anything_is_sent(tmp_path, name, content, said) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PublishError, match=said):
        list(passages_in([path]))
    with answering(200, meta(kvshare={})) as (url, asked):
        code, _, err = run(path, "--url", url)
    assert (code, asked) == (1, [])
    assert said in err
