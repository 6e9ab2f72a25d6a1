"""Installed but not asked for, KVShare changes nothing; asked for what it cannot do, it says so."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import yaml
from prompts import Book
from server import ServerConfig, refused_start
from server_configs import EAGER, ROOM, on

pytestmark = pytest.mark.engine

OUTPUTS: dict[str, list] = {}


@on("installed", "not_loaded")
def test_equal_with_the_package_installed_and_kept_out(server):
    book = Book(81)
    donor, pieces = book.donor([70, 50])
    prompts = [donor, book.prompt(pieces[::-1])[0], donor[:90], [*donor, *book.passage(20)]]
    answers = [server.generate(prompt, 12) for prompt in prompts]
    OUTPUTS[server.config.name] = [(a.ids, a.logprobs, a.cached) for a in answers]
    log = server.log()
    tree = re.search(r"Tree cache initialized: .*impl=(\w+)", log)
    assert tree is not None
    assert tree[1] == "UnifiedRadixCache"
    for answer in answers:
        assert "kvshare" not in (answer.meta.get("cached_tokens_details") or {})
    # Settings for a KVShare that is not there are as meaningless as any other custom parameter.
    assert server.generate([1, 2, 3], 2, reuse="off").ids
    assert "KVShare is on" not in log
    if len(OUTPUTS) == 2:
        assert OUTPUTS["installed"] == OUTPUTS["not_loaded"]
        # Positive control: the prefix cache was at work.
        assert OUTPUTS["installed"][3][2] == len(donor)


@on("installed")
def test_the_only_hooks_are_those_of_the_command_line(server):
    hooked = {
        line.split("sglang.srt.", 1)[1].split()[0].rstrip(",.:'\"")
        for line in server.log().splitlines()
        if "sglang.srt." in line and re.search(r"hook", line, re.IGNORECASE)
    }
    hooked = {name for name in hooked if "kvshare" not in name}
    assert hooked <= {
        "server_args.ServerArgs.add_cli_args",
        "server_args.ServerArgs.from_cli_args",
        "server_args.ServerArgs.resolve_once",
        "plugins",
    }, hooked


@on("installed")
def test_bad_values_mean_nothing_to_a_stock_server(server):
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {
            "max_new_tokens": 2,
            "custom_params": {"kvshare": {"reuse": "sometimes"}},
        },
    }
    assert server.post("/generate", body).status_code == 200


# --- refusals at start-up: each is a process that must end by itself -----------------------------


def refused(server_pool, tmp_path, model, *flags, kvshare=True, env=()):
    server_pool.stop()
    config = ServerConfig("refused", model, (*EAGER, *ROOM, *flags), env, kvshare=kvshare)
    return refused_start(server_pool.model(model), config, tmp_path / "log")


def last_line_of_ours(text):
    lines = [line for line in text.splitlines() if "KVShare" in line or "--kvshare" in line]
    assert lines, text[-3000:]
    return lines[-1]


def test_a_rope_that_is_not_served(server_pool, tmp_path):
    text = refused(server_pool, tmp_path, "longrope")
    assert "the RoPE kind Phi3LongRoPEScaledRotaryEmbedding beyond 512 positions" in (
        last_line_of_ours(text)
    )
    assert not re.search("Traceback|Load weight", text), text[-3000:]


def test_an_architecture_that_is_not_served(server_pool, tmp_path):
    text = refused(server_pool, tmp_path, "gemma")
    assert "--kvshare does not support GemmaForCausalLM" in last_line_of_ours(text)
    assert text.splitlines()[-1].startswith("KVShare: ")
    assert "LlamaForCausalLM" in text
    # Known from its configuration: nothing was spawned, and no weight was looked at.
    assert not re.search("Traceback|Load weight", text), text[-3000:]


def test_an_argument_that_is_not_served(server_pool, tmp_path):
    text = refused(server_pool, tmp_path, "llama", "--disable-radix-cache")
    assert "--disable-radix-cache" in last_line_of_ours(text)
    assert "Traceback" not in text, text[-3000:]


# What the command line alone decides needs no process of its own.


def arguments(*flags):
    """``ServerArgs.from_cli_args`` as hooked by the plug-in, up to what it calls."""
    import argparse

    from sglang_kvshare.engine import activation

    parser = argparse.ArgumentParser(exit_on_error=False)
    activation._add_cli_args(lambda parser: None, parser)
    return activation._from_cli_args(
        lambda cls, args: SimpleNamespace(), None, parser.parse_args(list(flags))
    )


@pytest.fixture
def no_activation(monkeypatch):
    """KVShare is not asked for in this process, nor after the test."""
    import os

    for name in [name for name in os.environ if name.startswith("KVSHARE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVSHARE", "0")


@pytest.mark.usefixtures("no_activation")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kvshare", "--kvshare-recompute-ratio", "2"], ["recompute_ratio", "0.0 to 1.0"]),
        (["--kvshare", "--kvshare-recompute-ratio", "nan"], ["recompute_ratio"]),
        (["--kvshare", "--kvshare-min-run-tokens", "1"], ["min_run_tokens", "4 to 1024"]),
        (["--kvshare-recompute-ratio", "0.5"], ["--kvshare-recompute-ratio", "without --kvshare"]),
        (["--kvshare-config", "x.yaml"], ["--kvshare-config", "without --kvshare"]),
        (["--kvshare", "--kvshare-config", "no/such.yaml"], ["no/such.yaml"]),
    ],
)
def test_a_bad_flag_stops_the_start_with_one_sentence(flags, words):
    with pytest.raises(SystemExit) as stop:
        arguments(*flags)
    text = str(stop.value)
    assert text.startswith("KVShare: ")
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.usefixtures("no_activation")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"recompute_ration": 0.1}, ["recompute_ration", "did you mean 'recompute_ratio'"]),
        ({"seam_tokens": True}, ["seam_tokens", "whole number"]),
        (["reuse"], ["mapping"]),
    ],
)
def test_a_bad_file_stops_the_start_with_one_sentence(tmp_path, content, words):
    path = tmp_path / "kvshare.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        arguments("--kvshare", "--kvshare-config", str(path))
    text = str(stop.value)
    assert text.startswith("KVShare: ")
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("KVSHARE_RECOMPUTE_RATIO", "2", "recompute_ratio"),
        ("KVSHARE_RECOMPUTE_RATIO", "much", "KVSHARE_RECOMPUTE_RATIO"),
        ("KVSHARE_RECOMPUTE_RATION", "0.5", "KVSHARE_RECOMPUTE_RATIO"),
        ("KVSHARE", "perhaps", "KVSHARE='perhaps'"),
    ],
)
@pytest.mark.usefixtures("no_activation")
def test_a_bad_variable_stops_the_start_with_one_sentence(monkeypatch, name, value, word):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        arguments("--kvshare") if name != "KVSHARE" else arguments()
    assert word in str(stop.value)


@pytest.mark.usefixtures("no_activation")
def test_nothing_is_activated_without_being_asked_for():
    from sglang_kvshare.engine.activation import active_config, asked_for

    assert asked_for(arguments()) is None
    config = asked_for(arguments("--kvshare", "--kvshare-seam-tokens", "3", "--kvshare-optional"))
    assert config is not None
    assert (config.seam_tokens, config.optional) == (3, True)
    # Asked for is not yet accepted.
    assert active_config() is None
