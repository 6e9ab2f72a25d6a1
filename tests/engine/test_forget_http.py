"""Forgetting, quotas and time to live of tenants on a real server."""

from __future__ import annotations

import json
import threading
import time

import pytest
import requests
from server import request_body
from server_configs import on
from test_tenants_http import served, story, who
from typer.testing import CliRunner

from sglang_kvshare import cli
from sglang_kvshare.treeview import TreePicture

pytestmark = [pytest.mark.engine, on("tenants")]
ADMIN = "key-admin"


def forget(server, tenant):
    """Exit code and counts of ``kvshare forget``."""
    done = CliRunner().invoke(cli.app, ["forget", server.url, tenant, "--json", "--api-key", ADMIN])
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def picture(server, **params):
    told = requests.get(
        server.url + "/kvshare/tree",
        params={"format": "json", **params},
        headers={"Authorization": f"Bearer {ADMIN}"},
        timeout=60,
    )
    assert told.status_code == 200, told.text
    return TreePicture.from_json(told.text)


def found(server, name, prompt):
    answer = served(server, name, prompt, publish=False)
    return answer.report["reused_tokens"] + answer.cached


def test_one_tenant_is_forgotten_and_the_others_are_not(server):
    donor, prompt, edited = story(71)
    for name in ("alice", "mallory", "gina"):
        served(server, name, donor)
        served(server, name, prompt)
    assert {one.tenants for one in picture(server).namespaces} == {
        *(("alice",), ("mallory",), ("gina",)),
    }
    code, told = forget(server, "alice")
    assert (code, told["left_tokens"]) == (0, 0)
    (one,) = told["replicas"]
    assert one["removed_tokens"] > len(donor)
    assert one["overwritten"]
    assert one["ranks_agree"]
    shown = picture(server)
    assert "alice" not in {node.tenant for node in shown.nodes}
    for ids in (prompt, edited, donor):
        assert found(server, "alice", ids) == 0
        # Positive control.
        assert found(server, "mallory", ids) > 100
        assert found(server, "gus", ids) > 100
    # What she sends from now on is cached as before.
    served(server, "alice", donor)
    assert found(server, "alice", prompt) > 200


def test_a_running_request_of_a_forgotten_tenant_leaves_nothing(server):
    donor, prompt, _ = story(72)
    served(server, "alice", donor)
    begun, ended = threading.Event(), threading.Event()

    def run():
        body = request_body([*donor, 5, 6, 7], 600) | {"stream": True}
        with requests.post(
            server.url + "/generate", json=body, headers=who("alice"), stream=True, timeout=180
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith(b"data:"):
                    begun.set()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    code, told = forget(server, "alice")
    assert not ended.is_set(), "the request ended too early for this test"
    (one,) = told["replicas"]
    assert (code, one["running_requests"], one["left_in_index"], one["left_windows"]) == (
        *(1, 1, 0, 0),
    )
    assert one["left_in_tree"] >= len(donor)
    assert one["left_in_running_requests"] > 0
    assert any(node.leaving for node in picture(server, namespace="alice").nodes)
    # Of what is still there nobody gets anything, she herself included.
    assert found(server, "alice", prompt) == found(server, "alice", donor) == 0
    thread.join(120)
    assert ended.is_set()
    code, told = forget(server, "alice")
    assert (code, told["left_tokens"]) == (0, 0)
    assert found(server, "alice", [*donor, 5, 6, 7]) == 0


@pytest.mark.parametrize("headers", [{}, who("alice"), who("operator"), who("gus")])
def test_tenants_cannot_look_and_cannot_forget(server, headers):
    for answer in (
        requests.get(server.url + "/kvshare/tree", headers=headers, timeout=60),
        server.post("/kvshare/forget", {"tenant": "alice"}, headers=headers),
    ):
        assert answer.status_code == 401
        assert "alice" not in answer.text


def test_unknown_tenants_are_refused_by_name(server):
    answer = server.post(
        "/kvshare/forget", {"tenant": "nobody"}, headers={"Authorization": f"Bearer {ADMIN}"}
    )
    assert answer.status_code == 400
    assert "allowed are alice, gina, gus, mallory" in answer.json()["error"]["message"]


def test_a_quota_bounds_the_donors_and_not_the_prefixes(server):
    donor, prompt, _ = story(73)
    served(server, "quinn", donor)
    shown = picture(server, namespace="quinn")
    assert sum(node.indexed_tokens for node in shown.nodes) == 100
    reused = served(server, "quinn", prompt, publish=False).report["reused_tokens"]
    assert 50 < reused <= 100
    assert served(server, "quinn", donor, publish=False).cached > 200
    # Positive control: who has no quota finds all of it.
    served(server, "alice", donor)
    assert served(server, "alice", prompt, publish=False).report["reused_tokens"] > 200


def test_text_past_its_time_to_live_is_not_used_at_all(server):
    donor, prompt, _ = story(74)
    for name in ("tess", "alice"):
        served(server, name, donor)
    began = time.monotonic()
    assert found(server, "tess", prompt) > 200
    assert found(server, "tess", donor) > 200
    time.sleep(max(0.0, began + 8.5 - time.monotonic()))
    assert found(server, "tess", donor) == found(server, "tess", prompt) == 0
    assert found(server, "alice", prompt) > 200
    assert "tess" not in {node.tenant for node in picture(server).nodes}
