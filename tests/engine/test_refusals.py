"""What is not served stops the start with one sentence, as early as it can be known; or, where
KVShare is optional, stock SGLang serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import refused_models
from server import Server, ServerConfig, environment, refused_start
from server_configs import ROOM, TENANT_SECRET, TENANTS

from sglang_kvshare.config import ENV_TENANT_SECRET

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
PLATFORM = (("SGLANG_PLATFORM", "kvshare_cpu"),)

#: (flags, what the sentence names). The arguments alone are tried one by one in the unit tests.
FLAGS = (
    ("--disable-radix-cache", "--disable-radix-cache"),
    ("--speculative-algorithm NGRAM", "speculative decoding"),
    ("--dllm-algorithm LowConfidence", "diffusion language models"),
    ("--disaggregation-mode prefill", "prefill-decode disaggregation"),
    ("--language-only", "encoder disaggregation"),
    ("--enable-pdmux", "PD multiplexing"),
    ("--enable-two-batch-overlap", "two-batch overlap"),
    ("--enable-hierarchical-cache", "HiCache"),
    ("--enable-lmcache", "LMCache"),
    ("--enable-flexkv", "FlexKV"),
    ("--enable-unified-cache-external-linker", "--enable-unified-cache-external-linker"),
    ("--enable-session-radix-cache", "--enable-session-radix-cache"),
    ("--enable-streaming-session", "streaming sessions"),
    ("--radix-eviction-policy tlru", "tlru"),
    ("--enable-hisparse", "HiSparse"),
    ("--enable-unified-memory", "--enable-unified-memory"),
    ("--enable-page-major-kv-layout", "--enable-page-major-kv-layout"),
    ("--enable-kv-cache-sharding", "--enable-kv-cache-sharding"),
    ("--prefill-only-disable-kv-cache", "--prefill-only-disable-kv-cache"),
    ("--kv-cache-dtype nvfp4", "--kv-cache-dtype"),
    ("--lora-paths a=b", "LoRA"),
    ("--pp-size 2", "pipeline parallelism"),
    ("--tp-size 2 --attn-cp-size 2", "context parallelism"),
    ("--tp-size 2 --dcp-size 2", "context parallelism"),
    ("--tp-size 2 --attn-dp-size 2", "attention data parallelism"),
    ("--is-embedding", "--is-embedding"),
    ("--model-impl transformers", "--model-impl"),
    ("--use-ray", "--use-ray"),
    ("--radix-cache-backend flexkv", "--radix-cache-backend"),
    ("--kvshare-similar-donors --kvshare-embedder ./none", "sglang-kvshare[embedder]"),
)
MODELS = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", "MLA"),
    "gemma2": ("Gemma2ForCausalLM", "sliding windows"),
    "gemma3": ("Gemma3ForCausalLM", "sliding windows"),
    "falcon_h1": ("FalconH1ForCausalLM", "Mamba"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "multimodal"),
    "qwen2_chunks": ("Qwen2ForCausalLM", "dual chunk"),
    "reward": ("LlamaForSequenceClassification", "reward models"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "supported are LlamaForCausalLM"),
}
BESIDE_TENANTS = (
    ("--api-key servers", "--api-key"),
    ("--schedule-policy lpm", "one tenant's hits would move another's requests"),
    ("--grpc-port 50051", "gRPC"),
    ("--tokenizer-worker-num 2", "tokenizer"),
    ("--enable-custom-logit-processor", "a client's code"),
    ("--kvshare-optional --watchdog-timeout 9", "tenants and optional do not go together"),
)
SERVED = ("llama", "mistral_window", "qwen2_window")


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """The outcome of every start of this module, by name; SGLang is imported once for all."""
    folder = tmp_path_factory.mktemp("early")
    paths = refused_models.write(folder / "models")
    refused_models.write_hub_cache(folder / "hub")
    llama = ["--model-path", paths["llama"]]
    tenants = ["--kvshare-tenants", str(TENANTS)]
    cases = {name: ["--model-path", path] for name, path in paths.items()}
    cases |= {flags: [*llama, *flags.split()] for flags, _ in FLAGS}
    cases |= {
        "hub": ["--model-path", refused_models.HUB_NAME],
        "ranks": [*llama, "--tp-size", "2"],
        "graphs": [*llama, "--cuda-graph-backend-prefill", "full"],
        "optional": [*llama, "--kvshare-optional"],
        "optional, flag": [*llama, "--kvshare-optional", "--enable-session-radix-cache"],
        "optional, model": ["--model-path", paths["gemma2"], "--kvshare-optional"],
        # SGLang refuses this one with any tree cache but its own.
        "optional, only with KVShare": [
            *llama,
            "--kvshare-optional",
            "--enable-unified-cache-external-linker",
        ],
        "tenants": [*llama, *tenants],
        **{flags: [*llama, *tenants, *flags.split()] for flags, _ in BESIDE_TENANTS},
        "tenants, no file": [*llama, "--kvshare-tenants", str(folder / "no-such-file.yaml")],
        "wrong SGLang": [*llama],
        "wrong SGLang, optional": [*llama, "--kvshare-optional"],
    }
    env = (("HF_HUB_CACHE", str(folder / "hub")), (ENV_TENANT_SECRET, TENANT_SECRET))
    config = ServerConfig("early", "llama", env=(*PLATFORM, *env))
    done = subprocess.run(
        [sys.executable, str(HERE / "early_starts.py")],
        input=json.dumps(cases),
        env=environment(config),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def sentence(outcome):
    """That of a start which ended as a command ends: exit status 1, and nothing but this."""
    assert outcome.get("how") == "SystemExit", outcome
    assert outcome["ended"].startswith("KVShare: ")
    assert "\n" not in outcome["ended"]
    return outcome["ended"]


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_is_accepted(early, name):
    """The window of these two is one that SGLang's classes ignore."""
    assert early[name] == {"on": True, "tree": "kvshare", "prefill_graph": None}


def test_further_ranks_and_chosen_graphs_are_accepted(early):
    assert early["ranks"]["on"]
    assert early["graphs"] == {"on": True, "tree": "kvshare", "prefill_graph": "full"}


@pytest.mark.parametrize(("flags", "words"), BESIDE_TENANTS, ids=lambda text: text[:30])
def test_what_does_not_go_with_tenants_is_refused(early, flags, words):
    assert early["tenants"]["on"]
    assert words in sentence(early[flags])


def test_a_tenants_file_that_cannot_be_read_stops_the_start(early):
    assert "no-such-file.yaml" in sentence(early["tenants, no file"])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_by_its_configuration(early, name):
    """There are no weights in these folders."""
    for words in MODELS[name]:
        assert words in sentence(early[name])


def test_a_model_of_the_hub_is_refused_by_its_configuration(early):
    assert "Gemma2ForCausalLM" in sentence(early["hub"])


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_an_argument_is_refused(early, flags, words):
    assert words in sentence(early[flags])


def test_another_sglang_is_refused(early):
    assert "no_such_symbol" in sentence(early["wrong SGLang"])


def test_where_it_is_optional_what_is_served_is_accepted(early):
    assert early["optional"] == early["llama"]


@pytest.mark.parametrize("name", ["optional, flag", "optional, model", "wrong SGLang, optional"])
def test_where_it_is_optional_sglang_resolves_as_without_kvshare(early, name):
    assert early[name] == {"on": False, "tree": None, "prefill_graph": None}


def test_where_it_is_optional_what_sglang_refuses_with_kvshare_alone_is_stock(early):
    outcome = early["optional, only with KVShare"]
    # Whatever SGLang then says of these flags, it is not about KVShare.
    assert outcome.get("tree") is None
    assert "requires the default UnifiedRadixCache" not in outcome.get("ended", "")


# --- whole servers --------------------------------------------------------------------------------


@pytest.fixture
def odd_pool(tmp_path):
    """The environment of a plug-in that brings its own KV pool, as out-of-tree platforms may; only
    the scheduler process sees that. An installed package is a folder on the path."""
    folder = tmp_path / "packages"
    (folder / "odd_pool-1.dist-info").mkdir(parents=True)
    (folder / "odd_pool-1.dist-info" / "METADATA").write_text("Name: odd-pool\nVersion: 1\n")
    (folder / "odd_pool-1.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nodd_pool = odd_pool:register\n"
    )
    (folder / "odd_pool.py").write_text(
        "def register():\n"
        "    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "    target = 'sglang.srt.mem_cache.memory_pool.MHATokenToKVPool'\n"
        "    OddPool = type('OddPool', (MHATokenToKVPool,), {})\n"
        "    HookRegistry.register(target, OddPool, HookType.REPLACE)\n"
    )
    return (("PYTHONPATH", str(folder)),)


def last_line(text):
    return [line for line in text.splitlines() if line.strip()][-1]


def test_what_only_the_scheduler_sees_ends_with_the_sentence(server_pool, tmp_path, odd_pool):
    server_pool.stop()
    config = ServerConfig("odd", "llama", ROOM, odd_pool)
    text = refused_start(server_pool.model("llama"), config, tmp_path / "log")
    assert last_line(text) == "KVShare: --kvshare does not know the KV pool OddPool"
    # SGLang's own account of a scheduler that failed is still there.
    assert "Scheduler hit an exception" in text


@pytest.mark.parametrize("seen_by", ["the launcher", "the scheduler"])
def test_where_it_is_optional_stock_sglang_serves(server_pool, tmp_path, odd_pool, seen_by):
    server_pool.stop()
    # `kvshare=False` in what the tests expect of the answers; the flag is given all the same.
    flags = (*ROOM, "--kvshare", "--kvshare-optional")
    if seen_by == "the launcher":
        flags, env, reason = (*flags, "--enable-session-radix-cache"), (), "session"
    else:
        env, reason = odd_pool, "OddPool"
    config = ServerConfig("optional", "llama", flags, env, kvshare=False)
    server = Server(config, server_pool.model("llama"), tmp_path / "log")
    try:
        prompt = list(range(3, 120))
        cold, warm = server.generate(prompt, 8), server.generate([*prompt, 7], 8)
        # SGLang's own prefix cache is at work, and nothing of ours is in any answer.
        assert warm.cached == len(prompt)
        for answer in (cold, warm):
            assert "kvshare" not in (answer.meta.get("cached_tokens_details") or {})
        # Settings mean as little as any other custom parameter, bad ones included.
        assert server.generate(prompt, 8, reuse="off").cached == len(prompt) - 1
        assert server.generate(prompt, 8, reuse="sometimes", nonsense=1).ids == cold.ids
        server.assert_healthy()
        log = server.log()
    finally:
        server.stop()
    assert "impl=UnifiedRadixCache" in log
    [warning] = [line for line in log.splitlines() if "KVShare is off" in line]
    assert "stock SGLang serves: --kvshare does not" in warning
    assert reason in warning
    assert not re.search("KVShare is on|Traceback", log)


def test_doctor_makes_the_same_checks(tmp_path):
    """With a model that is served and one that is not; the process is the command's own."""
    paths = refused_models.write(tmp_path / "models")
    env = environment(ServerConfig("doctor", "llama"))
    found = {}
    for name, optional in (("llama", []), ("falcon_h1", ["--kvshare-optional"])):
        command = [
            *(sys.executable, "-c", "from sglang_kvshare.cli import main; main()", "doctor"),
            *("--json", "--model-path", paths[name], "--skip-tokenizer-init", *optional),
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        found[name] = json.loads(done.stdout)
        assert done.returncode == (0 if found[name]["would_start"] else 1), done.stderr[-2000:]
        states = {item["what"]: item["state"] for item in found[name]["findings"]}
        assert states["seams"] == states["SGLang"] == "ok"
        assert {"platform", "memory"} <= set(states)
    served, refused = found["llama"]["findings"][-1], found["falcon_h1"]["findings"][-1]
    assert found["llama"]["would_start"]
    assert (served["state"], served["what"]) == ("ok", paths["llama"])
    assert not found["falcon_h1"]["would_start"]
    assert (refused["state"], refused["what"]) == ("no", paths["falcon_h1"])
    assert "--kvshare does not support FalconH1ForCausalLM" in refused["says"]
