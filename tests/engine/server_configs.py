"""The servers of the engine tests. Each start costs half a minute, so that they are few and each
differs from the others in many ways at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server import ServerConfig, free_port

#: Any plan is carried out, so that small prompts do.
EAGER = (
    *("--kvshare-min-saved-tokens", "1", "--kvshare-gate", "off"),
    *("--kvshare-refresh-slowdown", "1e9"),
    # Chosen by the plan alone, which the reference of most tests can follow.
    *("--kvshare-selector", "seams", "--kvshare-recompute-ratio", "0.05"),
)
ROOM = ("--max-total-tokens", "4096", "--max-running-requests", "24")
#: A few prompts fill it: donors are evicted, and requests wait for memory.
TIGHT = ("--max-total-tokens", "1024", "--max-running-requests", "24")
RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "5"))
CHUNKS = ("--chunked-prefill-size", "64")
TWO = ("--tp-size", "2")
RANKS = (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
TENANTS = Path(__file__).with_name("tenants.yaml")
TENANT_SECRET = "0123456789abcdef0123456789abcdef"
NO_SEAMS = ("--kvshare-seam-tokens", "0", "--kvshare-tail-tokens", "0")


#: A replica publishes at this port, or at as many behind it as its number says.
EVENTS_PORT = free_port()


def events(port: int) -> tuple[str, str]:
    """Tell routers what is cached, as SGLang does."""
    told = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"}
    return ("--kv-events-config", json.dumps(told))


def _configs(*configs: ServerConfig) -> dict[str, ServerConfig]:
    return {config.name: config for config in configs}


CONFIGS = _configs(
    ServerConfig("llama", "llama", (*EAGER, *ROOM)),
    ServerConfig(
        "qwen3",
        "qwen3",
        (
            *(*EAGER, *ROOM, *CHUNKS, "--enable-mixed-chunk"),
            *("--page-size", "16", "--kvshare-narrow-layer", "2"),
        ),
    ),
    ServerConfig(
        "mistral",
        "mistral",
        (
            *(*EAGER, *ROOM, *CHUNKS, *NO_SEAMS, "--page-size", "64"),
            *("--disable-overlap-schedule", "--kvshare-max-depth", "0"),
        ),
    ),
    ServerConfig(
        "qwen2",
        "qwen2",
        (
            *(*EAGER, *TIGHT, *CHUNKS, "--enable-mixed-chunk", "--schedule-policy", "lpm"),
            *("--kvshare-narrow-layer", "1"),
        ),
        RETRACT,
    ),
    ServerConfig(
        "llama3_rope",
        "llama3_rope",
        (
            *(*EAGER, *TIGHT, *CHUNKS, "--disable-overlap-schedule"),
            *("--page-size", "16", "--kvshare-narrow-layer", "2"),
        ),
        RETRACT,
    ),
    ServerConfig(
        "linear_rope",
        "linear_rope",
        (
            *(*EAGER, "--max-total-tokens", "1536", "--max-running-requests", "24"),
            # A mixed chunk gives a token to each decoding row, and the rest in whole pages.
            *("--chunked-prefill-size", "192", "--enable-mixed-chunk", "--page-size", "64"),
        ),
        RETRACT,
    ),
    ServerConfig(
        "glm4",
        "glm4",
        (*EAGER, *ROOM, *CHUNKS, "--page-size", "16", "--kvshare-narrow-layer", "1"),
    ),
    # Two processes, each with a core and half of the heads.
    ServerConfig("two_ranks", "llama", (*EAGER, *ROOM, *TWO), RANKS),
    # Two schedulers, each with all heads and a pool of its own.
    ServerConfig(
        "two_replicas", "llama", (*EAGER, *ROOM, "--dp-size", "2", *events(EVENTS_PORT)), RANKS
    ),
    ServerConfig(
        "two_ranks_tight",
        "llama",
        (*EAGER, *TIGHT, *CHUNKS, *TWO, "--page-size", "16", "--enable-mixed-chunk"),
        (*RETRACT, *RANKS),
    ),
    ServerConfig(
        "fp8_e4m3", "qwen3", (*EAGER, *ROOM, "--page-size", "16", "--kv-cache-dtype", "fp8_e4m3")
    ),
    ServerConfig("fp8_e5m2", "glm4", (*EAGER, *ROOM, "--kv-cache-dtype", "fp8_e5m2")),
    ServerConfig(
        "tenants",
        "llama_words",
        (
            *(*EAGER, *ROOM, "--kvshare-tenants", str(TENANTS), "--kvshare-similar-donors"),
            *("--enable-metrics", "--admin-api-key", "key-admin", "--enable-cache-report"),
        ),
        (("KVSHARE_TENANT_SECRET", TENANT_SECRET),),
        tokenizer=True,
    ),
    # Without --kvshare: the platform by its name, the plug-in installed or kept out.
    ServerConfig("installed", "llama", ROOM, (("SGLANG_PLATFORM", "kvshare_cpu"),), kvshare=False),
    ServerConfig(
        "not_loaded",
        "llama",
        ROOM,
        (("SGLANG_PLATFORM", "kvshare_cpu"), ("SGLANG_PLUGINS", "kvshare_cpu")),
        kvshare=False,
    ),
)

#: Every model family and kind of RoPE, page size, narrowing layer, chunking and scheduling mode.
ALL = ("llama", "qwen3", "mistral", "qwen2", "llama3_rope", "linear_rope", "glm4")
STORMY = ("qwen2", "llama3_rope", "linear_rope")


def on(*names: str):
    """Run a test on each of the servers named."""
    return pytest.mark.parametrize("server", names, indirect=True)
