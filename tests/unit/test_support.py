"""Every refusal, by the facts that bring it about; and the document that lists them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_kvshare.engine import support
from sglang_kvshare.engine.support import (
    ARGUMENT_REFUSALS,
    CHOSEN_REFUSALS,
    MODEL_REFUSALS,
    ModelFacts,
    Unsupported,
    check_arguments,
    check_chosen,
    check_model_facts,
)
from sglang_kvshare.engine.support_table import REFUSED, SUPPORTED, markdown, rows

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]

#: SGLang's resolved arguments of a server that is served.
SERVED = SimpleNamespace(
    disable_radix_cache=False,
    radix_cache_backend="kvshare",
    speculative_algorithm=None,
    dllm_algorithm=None,
    disaggregation_mode="null",
    encoder_only=False,
    language_only=False,
    enable_pdmux=False,
    enable_two_batch_overlap=False,
    enable_hierarchical_cache=False,
    enable_lmcache=False,
    enable_flexkv=False,
    enable_unified_cache_external_linker=False,
    enable_session_radix_cache=False,
    enable_streaming_session=False,
    radix_eviction_policy="lru",
    enable_hisparse=False,
    enable_unified_memory=False,
    enable_page_major_kv_layout=False,
    enable_kv_cache_sharding=False,
    prefill_only_disable_kv_cache=False,
    kv_cache_dtype="auto",
    enable_lora=None,
    lora_paths=None,
    pp_size=1,
    attn_cp_size=1,
    dcp_size=1,
    attn_dp_size=1,
    is_embedding=False,
    model_impl="auto",
    use_ray=False,
    attention_backend="torch_native",
    prefill_attention_backend=None,
    decode_attention_backend=None,
    enable_mis=False,
)
#: (argument, value, what the sentence must name). Every refusal has at least one.
ARGUMENTS = (
    ("disable_radix_cache", True, "--disable-radix-cache"),
    ("radix_cache_backend", "flexkv", "--radix-cache-backend"),
    ("speculative_algorithm", "EAGLE", "speculative decoding"),
    ("dllm_algorithm", "LowConfidence", "diffusion"),
    ("disaggregation_mode", "prefill", "disaggregation"),
    ("disaggregation_mode", "decode", "disaggregation"),
    ("encoder_only", True, "--encoder-only"),
    ("language_only", True, "--language-only"),
    ("enable_pdmux", True, "--enable-pdmux"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_hierarchical_cache", True, "HiCache"),
    ("enable_lmcache", True, "LMCache"),
    ("enable_flexkv", True, "FlexKV"),
    ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
    ("enable_session_radix_cache", True, "--enable-session-radix-cache"),
    ("enable_streaming_session", True, "--enable-streaming-session"),
    ("radix_eviction_policy", "tlru", "tlru"),
    ("enable_hisparse", True, "HiSparse"),
    ("enable_unified_memory", True, "--enable-unified-memory"),
    ("attention_backend", "intel_amx", "--attention-backend"),
    ("prefill_attention_backend", "fa4", "--prefill-attention-backend"),
    ("decode_attention_backend", "trtllm_mha", "--decode-attention-backend"),
    ("enable_mis", True, "--enable-mis"),
    ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout"),
    ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
    ("prefill_only_disable_kv_cache", True, "--prefill-only-disable-kv-cache"),
    ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype"),
    ("enable_lora", True, "LoRA"),
    ("lora_paths", ["a=b"], "LoRA"),
    ("pp_size", 2, "pipeline parallelism"),
    ("attn_cp_size", 2, "context parallelism"),
    ("dcp_size", 2, "context parallelism"),
    ("attn_dp_size", 2, "attention data parallelism"),
    ("is_embedding", True, "--is-embedding"),
    ("model_impl", "transformers", "--model-impl"),
    ("model_impl", SimpleNamespace(value="mindspore"), "--model-impl"),
    ("use_ray", True, "--use-ray"),
)

LLAMA = ModelFacts(("LlamaForCausalLM",))
MODELS = (
    ({"generates": False}, "embedding and reward models"),
    ({"encoder_decoder": True}, "encoder-decoder"),
    ({"multimodal": True}, "multimodal"),
    ({"m_rope": True}, "M-RoPE"),
    ({"attention": "mla"}, "MLA"),
    ({"attention": "ssm"}, "Mamba"),
    ({"recurrent": True}, "Mamba"),
    ({"dual_chunk": True}, "dual chunk"),
    ({"windowed": True, "architectures": ("Gemma2ForCausalLM",)}, "sliding windows"),
)


def refusal_by(check, subject):
    with pytest.raises(Unsupported) as refused:
        check(subject)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith("--kvshare does not support ")
    return sentence


@pytest.fixture(autouse=True)
def no_rust_server(monkeypatch):
    monkeypatch.delenv("SGLANG_RUST_SERVER", raising=False)


def check_all_arguments(args):
    check_arguments(args)
    check_chosen(args)


def test_what_is_served_is_not_refused():
    check_all_arguments(SERVED)
    for name in support.SUPPORTED_MODELS:
        check_model_facts(ModelFacts((name,)))


@pytest.mark.parametrize(("name", "value", "words"), ARGUMENTS)
def test_each_argument_is_refused_by_name_and_reason(name, value, words):
    sentence = refusal_by(check_all_arguments, SimpleNamespace(**{**vars(SERVED), name: value}))
    assert words in sentence
    every = (*ARGUMENT_REFUSALS, *CHOSEN_REFUSALS)
    [reason] = {refusal.why for refusal in every if refusal.what in sentence}
    assert sentence.endswith(": " + reason)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False)])
def test_the_rust_server_is_refused(monkeypatch, value, refused):
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    if refused:
        assert "SGLANG_RUST_SERVER" in refusal_by(check_arguments, SERVED)
    else:
        check_arguments(SERVED)


@pytest.mark.parametrize(("facts", "words"), MODELS)
def test_each_kind_of_model_is_refused_by_class_and_reason(facts, words):
    model = replace(LLAMA, **facts)
    sentence = refusal_by(check_model_facts, model)
    assert words in sentence
    assert model.architectures[0] in sentence


def test_any_other_class_is_refused_with_what_is_supported():
    sentence = refusal_by(check_model_facts, ModelFacts(("GemmaForCausalLM",)))
    for name in ("GemmaForCausalLM", *support.SUPPORTED_MODELS):
        assert name in sentence


def test_the_special_reason_comes_before_the_general_one():
    both = ModelFacts(("DeepseekV2ForCausalLM",), attention="mla", windowed=True)
    assert "MLA" in refusal_by(check_model_facts, both)


def test_a_window_that_sglang_ignores_is_served():
    check_model_facts(ModelFacts(("MistralForCausalLM",), windowed=True))


def test_sglang_chooses_among_several_classes():
    """Which of them it takes is seen when the model is loaded."""
    check_model_facts(ModelFacts(("UnknownForCausalLM", "LlamaForCausalLM")))


def test_every_refusal_is_tried_here():
    tried = [SimpleNamespace(**{**vars(SERVED), name: value}) for name, value, _ in ARGUMENTS]
    for refusal in (*ARGUMENT_REFUSALS, *CHOSEN_REFUSALS):
        if refusal.what != "SGLANG_RUST_SERVER":
            assert any(refusal.applies(args) for args in tried), refusal.what
    models = [replace(LLAMA, **facts) for facts, _ in MODELS]
    for refusal in MODEL_REFUSALS:
        assert any(refusal.applies(model) for model in models), refusal.what


# --- the table ------------------------------------------------------------------------------------


def test_the_document_is_the_table():
    """To write it anew: ``python -m sglang_kvshare.engine.support_table > docs/support.md``."""
    assert (ROOT / "docs" / "support.md").read_text() == markdown()


def test_the_table_has_a_row_for_everything_that_is_checked():
    table = {row.what: row for row in rows()}
    assert len(table) == len(rows()), "two rows of one name"
    for refusal in (*ARGUMENT_REFUSALS, *CHOSEN_REFUSALS, *MODEL_REFUSALS):
        assert (table[refusal.what].status, table[refusal.what].why) == (REFUSED, refusal.why)
    for name in (*support.SUPPORTED_MODELS, *dict(support.SUPPORTED_ROPE_KINDS)):
        assert table[name].status == SUPPORTED


def test_each_cell_fits_into_one():
    for row in rows():
        for cell in (row.group, row.what, row.status, row.why, row.decided_by):
            assert cell
            assert not set(cell) & set("|\n"), row


def test_readme_names_the_document():
    assert "docs/support.md" in (ROOT / "README.md").read_text()
