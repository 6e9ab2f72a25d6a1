"""`kvshare verify` against a fake server: it passes a right one, and fails each wrong one."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping

import pytest
from fake_sglang import VOCAB, fake_sglang
from typer.testing import CliRunner

from sglang_kvshare import cli
from sglang_kvshare.verify.checks import verify
from sglang_kvshare.verify.client import Answer, VerifyError
from sglang_kvshare.verify.difference import compare

pytestmark = pytest.mark.unit

REUSED, RATIO_1, ISOLATED, OFF, SUMS = range(5)
TOKENS = 96


def failed(found) -> set[int]:
    return {number for number, check in enumerate(found.checks) if not check.passed}


def test_a_right_server_passes_and_all_is_told():
    with fake_sglang() as server:
        found = verify(server.url, passage_tokens=TOKENS)
    assert found.ok
    assert found.prompts_made_of == "text"
    assert found.tolerance == 1e-3
    assert found.ratio_1.first_divergence is None
    assert found.ratio_1.max_logprob == 0
    assert found.default.max_logprob == pytest.approx(0.3)
    assert found.answers["default"].count("reused") > TOKENS * 0.8
    assert found.answers["default"].text == found.answers["off"].text
    assert found.notes == ()
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("fault", ["no tokenizer", "incremental"])
def test_other_kinds_of_right_servers_pass_too(fault):
    with fake_sglang(fault) as server:
        found = verify(server.url, passage_tokens=TOKENS)
        ids = {token for body in server.bodies for token in body["input_ids"]}
    assert found.ok
    assert len(found.answers["off"].ids) == 16
    assert max(ids) < VOCAB
    assert (found.prompts_made_of == "token ids") is (fault == "no tokenizer")
    assert (found.answers["off"].text is None) is (fault == "no tokenizer")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("wrong at ratio 1", {RATIO_1}),
        ("imprecise at ratio 1", {RATIO_1}),
        ("leaks between salts", {ISOLATED}),
        ("off takes", {OFF}),
        ("counts do not sum", {SUMS}),
        ("gate closed", {REUSED, RATIO_1}),
    ],
)
def test_each_wrong_server_fails_the_check_that_is_for_it(fault, expected):
    with fake_sglang(fault) as server:
        found = verify(server.url, passage_tokens=TOKENS)
    assert failed(found) == expected
    assert not found.ok


def test_a_tolerance_forgives_what_is_within_it_and_no_more():
    with fake_sglang("imprecise at ratio 1") as server:
        assert failed(verify(server.url, passage_tokens=TOKENS, tolerance=0.11)) == set()
        assert failed(verify(server.url, passage_tokens=TOKENS, tolerance=0.09)) == {RATIO_1}
    with fake_sglang("imprecise at ratio 1", info={"dtype": "bfloat16"}) as server:
        assert failed(verify(server.url, passage_tokens=TOKENS)) == set()


def test_a_tie_is_no_wrong_answer():
    with fake_sglang("tie at ratio 1") as server:
        found = verify(server.url, passage_tokens=TOKENS)
        strict = verify(server.url, passage_tokens=TOKENS, tolerance=1e-5)
    assert found.ok
    assert found.ratio_1.first_divergence == 3
    assert found.ratio_1.tie
    assert failed(strict) == {RATIO_1}


def test_why_nothing_was_reused_is_told_with_what_to_do():
    with fake_sglang("gate closed") as server:
        found = verify(server.url, passage_tokens=TOKENS)
    assert "gate_closed (ask for a longer passage: --tokens)" in found.checks[REUSED].detail


@pytest.mark.parametrize("mode", ["off", "exact_prefix"])
def test_a_server_that_reuses_only_when_asked_passes_with_a_note(mode):
    with fake_sglang(default_reuse=mode) as server:
        found = verify(server.url, passage_tokens=TOKENS)
    assert found.ok
    (note,) = found.notes
    assert f"default is reuse = {mode}" in note


def test_every_salt_is_private_and_new_in_each_run():
    with fake_sglang() as server:
        verify(server.url, passage_tokens=TOKENS)
        first = {body["cache_salt"] for body in server.bodies}
        server.bodies.clear()
        verify(server.url, passage_tokens=TOKENS)
        second = {body["cache_salt"] for body in server.bodies}
    assert len(first) == len(second) == 4
    assert not first & second
    assert all(salt.startswith("kvshare-verify-") and len(salt) > 30 for salt in first)


def test_data_parallel_ranks_are_not_mixed():
    with fake_sglang(info={"dp_size": 2}) as server:
        verify(server.url, passage_tokens=TOKENS)
        assert {body.get("routed_dp_rank") for body in server.bodies} == {0}
    with fake_sglang() as server:
        verify(server.url, passage_tokens=TOKENS)
        assert not any("routed_dp_rank" in body for body in server.bodies)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("faults", "options", "message"),
    [
        (["stock"], {}, "runs SGLang without KVShare: start it with --kvshare"),
        ([], {"api_key": "secret"}, "another key than it was given: --api-key KEY"),
        (["busy"], {}, "is busy (503): The request queue is full."),
        (["abort"], {}, "gave up the request (is it too busy?): The request queue is full."),
        (["error in the stream"], {}, "failed to generate: out of memory"),
        (["no sglang"], {}, "/server_info is not answered with JSON"),
        ([], {"info": {"max_req_input_len": 250}}, "ask for a shorter passage: --tokens 50"),
    ],
)
def test_a_server_that_cannot_be_verified_is_named_plainly(faults, options, message):
    with fake_sglang(*faults, **options) as server, pytest.raises(VerifyError) as caught:
        verify(server.url, passage_tokens=TOKENS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_server_and_a_silent_one():
    port = free_port()
    with pytest.raises(VerifyError, match=f"no server answers at http://127.0.0.1:{port}"):
        verify(f"127.0.0.1:{port}")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(VerifyError, match=r"did not answer within 0\.2 s"):
            verify(url, timeout=0.2)
    for url in ("http://[broken", "http://127.0.0.1:1x", "ftp://127.0.0.1"):
        with pytest.raises(VerifyError):
            verify(url)


def test_the_right_key_opens():
    with fake_sglang(api_key="secret") as server:
        assert verify(server.url + "/", api_key="secret", passage_tokens=TOKENS).ok


# --- the comparison --------------------------------------------------------------------------


def answer(ids: list[int], top: list[Mapping[int, float]]) -> Answer:
    return Answer(tuple(ids), tuple(top), text=None, report={}, ttft_ms=1.0)


def test_what_follows_a_divergence_is_not_compared():
    full = answer([1, 2, 3], [{1: -0.1, 9: -3}, {2: -0.2, 8: -2}, {3: -0.1}])
    other = answer([1, 8, 4], [{1: -0.15, 9: -3}, {8: -0.3, 2: -1.2}, {3: -50.0}])
    found = compare(full, other, 0.01)
    assert found.first_divergence == 1
    assert not found.tie
    assert found.top1_agreement == pytest.approx(1 / 3)
    assert found.max_logprob == pytest.approx(1.7)
    assert not found.within(1.8)
    assert compare(full, full, 0).within(0)


def test_a_shorter_answer_and_one_with_nothing_in_common_differ():
    full = answer([1, 2], [{1: -0.1}, {2: -0.1}])
    short = compare(full, answer([1], [{1: -0.1}]), 1.0)
    assert (short.first_divergence, short.tie, short.top1_agreement) == (1, False, 0.5)
    assert not short.within(math.inf)
    strange = compare(full, answer([7, 7], [{7: -0.1}, {7: -0.1}]), 1.0)
    assert strange.max_logprob is None
    assert not strange.within(math.inf)


# --- the command -----------------------------------------------------------------------------


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["verify", *args, "--tokens", str(TOKENS)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_tables_and_tells_by_its_exit_code():
    with fake_sglang() as server:
        code, out, _ = run(server.url)
    assert code == 0
    assert out.rstrip().endswith("KVShare works here.")
    assert "stranger" in out
    with fake_sglang("leaks between salts") as server:
        code, out, _ = run(server.url)
    assert code == 1
    assert "FAILED" in out
    assert "does NOT work" in out


def test_the_command_prints_one_json_object():
    with fake_sglang() as server:
        code, out, _ = run(server.url, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert found["requests"]["default"]["report"]["reused_tokens"] > 0
    assert found["ratio_1_against_off"]["max_logprob"] == 0
    with fake_sglang("stock") as server:
        code, out, err = run(server.url, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert err.startswith("kvshare: ")
