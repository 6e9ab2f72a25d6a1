"""Which rotation a layer has, what is refused with which reason, and which pools are known."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import SimpleNamespace

import pytest
import torch
from rotary import CONTEXT, KINDS, LONGROPE, MAX, YARN, made, rope_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

MROPE = {"rope_type": "default", "mrope_section": [16, 8, 8]}
#: rope_scaling -> class of SGLang, all refused at any length.
REFUSED = {
    "mrope": (MROPE, "MRotaryEmbedding"),
    "mrope_yarn": (YARN | {"mrope_section": [16, 8, 8]}, "YaRNScalingMRotaryEmbedding"),
    "video_rope": (MROPE | {"video_rope": True}, "BailingMRotaryEmbedding"),
    "deepseek": (YARN | {"rope_type": "deepseek_yarn"}, "DeepseekScalingRotaryEmbedding"),
}
#: Kinds with a length of their own: the last context that is served.
LENGTHS = {
    "linear": (3 * MAX, "LinearScalingRotaryEmbedding"),
    "ntk_alpha": (MAX, "DynamicNTKAlphaRotaryEmbedding"),
    "dynamic": (2 * MAX, "DynamicNTKScalingRotaryEmbedding"),
    "longrope_short": (MAX, "Phi3LongRoPEScaledRotaryEmbedding"),
}


def refusal_of(rope, context=CONTEXT):
    """The sentence, or ``None``."""
    from sglang_kvshare.engine.geometry import Unsupported, rotation_of

    try:
        rotation_of(rope, context)
    except Unsupported as refusal:
        text = str(refusal)
        assert text.startswith("--kvshare does not ")
        assert "\n" not in text
        return text
    return None


def hf_config(scaling, **more):
    return SimpleNamespace(rope_parameters=scaling, max_position_embeddings=MAX, **more)


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_cannot_be_moved_is_refused_with_its_class_and_the_reason(name):
    from sglang_kvshare.engine.geometry import REFUSED_ROPE_KINDS, rope_refusal_from_config

    scaling, kind = REFUSED[name]
    rope = made(rope_scaling=scaling)
    assert type(rope).__name__ == kind
    text = refusal_of(rope)
    assert f"the RoPE kind {kind}: {dict(REFUSED_ROPE_KINDS)[kind]}" in text
    assert rope_refusal_from_config(hf_config(scaling)) == text
    # Positive control: the same without what makes it special.
    plain = {k: v for k, v in scaling.items() if k not in ("mrope_section", "video_rope")}
    if name == "deepseek":
        plain["rope_type"] = "yarn"
    assert refusal_of(made(rope_scaling=plain)) is None
    assert rope_refusal_from_config(hf_config(plain)) is None


def test_kinds_that_no_cpu_can_build_are_refused_too():
    from sglang.srt.layers.rotary_embedding.rope_variant import (
        DualChunkRotaryEmbedding,
        FourierRotaryEmbedding,
    )

    from sglang_kvshare.engine.geometry import rope_refusal_from_config

    text = refusal_of(DualChunkRotaryEmbedding.__new__(DualChunkRotaryEmbedding))
    assert "DualChunkRotaryEmbedding" in text
    assert "chunk" in text
    config = hf_config(None, dual_chunk_attention_config={"chunk_size": 128, "local_size": 8})
    assert rope_refusal_from_config(config) == text
    assert rope_refusal_from_config(hf_config(None, dual_chunk_attention_config=None)) is None

    text = refusal_of(FourierRotaryEmbedding.__new__(FourierRotaryEmbedding))
    assert "FourierRotaryEmbedding" in text
    scaling = {"rope_type": "default", "use_fope": True}
    assert rope_refusal_from_config(hf_config(scaling)) == text
    assert rope_refusal_from_config(hf_config(scaling | {"use_fope": False})) is None


@pytest.mark.parametrize("name", LENGTHS)
def test_a_kind_with_a_length_of_its_own_is_served_up_to_it(name):
    from sglang_kvshare.engine.geometry import rope_refusal_from_config

    length, kind = LENGTHS[name]
    rope = rope_of(name)
    config = hf_config(KINDS[name]["rope_scaling"])
    assert refusal_of(rope, length) is None
    assert rope_refusal_from_config(config, length) is None
    text = refusal_of(rope, length + 1)
    assert f"{kind} beyond {length} positions" in text
    assert f"context length is {length + 1}" in text
    assert rope_refusal_from_config(config, length + 1) == text
    # A longer table than its own, as SGLang makes for a longer context, changes nothing.
    if hasattr(rope, "_ensure_cos_sin_cache_length"):
        rope._ensure_cos_sin_cache_length(length + 500)
        assert refusal_of(rope, length + 1) == text


@pytest.mark.parametrize("name", ["ntk_alpha", "dynamic", "linear"])
def test_beyond_its_length_sglang_has_other_frequencies(name):
    """Why it is refused: the rows that SGLang adds are those of plain RoPE."""
    length, _ = LENGTHS[name]
    rope, plain = rope_of(name), made(max_position=length + 64)
    rope._ensure_cos_sin_cache_length(length + 64)
    ours, others = rope.cos_sin_cache, plain.cos_sin_cache
    torch.testing.assert_close(ours[length : length + 64], others[length:], atol=1e-4, rtol=0)
    assert (ours[length - 64 : length] - others[length - 64 : length]).abs().max() > 0.5


def test_longrope_takes_another_table_for_a_batch_with_a_longer_prompt():
    """Why it is refused: the key at position 5 depends on what else is in the batch."""
    rope = rope_of("longrope_short")
    keys = torch.randn(2, rope.head_size)
    alone = rope(torch.tensor([5, 6]), keys.clone(), keys.clone())[1]
    beside = rope(torch.tensor([5, MAX + 1]), keys.clone(), keys.clone())[1]
    assert (alone[0] - beside[0]).abs().max() > 0.1
    again = rope(torch.tensor([5, MAX - 1]), keys.clone(), keys.clone())[1]
    assert torch.equal(alone[0], again[0])


def test_every_rotary_class_of_sglang_is_either_served_or_refused():
    """No class slips through by inheriting from one that is served."""
    from sglang.srt.layers import rotary_embedding

    from sglang_kvshare.engine.geometry import REFUSED_ROPE_KINDS, SUPPORTED_ROPE_KINDS

    served, refused = dict(SUPPORTED_ROPE_KINDS), dict(REFUSED_ROPE_KINDS)
    assert not served.keys() & refused.keys()
    found = set()
    for module in pkgutil.iter_modules(rotary_embedding.__path__, rotary_embedding.__name__ + "."):
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, torch.nn.Module) and name.endswith("RotaryEmbedding"):
                found.add(name)
    assert found == served.keys() | refused.keys()
    # Each that is served is among those tested for exactness.
    assert {type(rope_of(kind)).__name__ for kind in KINDS} == served.keys()


def test_an_unknown_subclass_is_refused():
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    class HomeMadeRotaryEmbedding(RotaryEmbedding):
        pass

    own = HomeMadeRotaryEmbedding(64, 64, 128, 10_000, True, torch.float32)
    text = refusal_of(own, 128)
    assert "HomeMadeRotaryEmbedding" in text
    assert "supported are RotaryEmbedding, " in text
    assert refusal_of(RotaryEmbedding(64, 64, 128, 10_000, True, torch.float32), 128) is None


def test_several_linear_factors_and_too_short_a_table_are_refused():
    from sglang.srt.layers.rotary_embedding.base import (
        LinearScalingRotaryEmbedding,
        RotaryEmbedding,
    )

    several = LinearScalingRotaryEmbedding(64, 64, 128, 10_000, True, [1.0, 2.0], torch.float32)
    assert "several scaling factors" in refusal_of(several, 128)
    one = LinearScalingRotaryEmbedding(64, 64, 128, 10_000, True, [2.0], torch.float32)
    assert refusal_of(one, 128) is None
    short = RotaryEmbedding(64, 64, 128, 10_000, True, torch.bfloat16)
    short._ensure_cos_sin_cache_length(500)
    assert refusal_of(short, 128) is None
    assert re.search("context length of 129 .* table has 128 positions", refusal_of(short, 129))


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_speaks_against_none_that_is_served(kind):
    from sglang_kvshare.engine.geometry import rope_refusal_from_config

    scaling = KINDS[kind].get("rope_scaling")
    for config in (
        hf_config(scaling),
        SimpleNamespace(rope_scaling=scaling, max_position_embeddings=MAX),
        SimpleNamespace(text_config=hf_config(scaling)),
        # One dictionary for each type of layer.
        hf_config({"full_attention": scaling or {}, "other": {"rope_type": "default"}}),
    ):
        assert rope_refusal_from_config(config) is None


def test_the_configuration_of_each_type_of_layer_is_judged():
    from sglang_kvshare.engine.geometry import rope_refusal_from_config

    plain = {"rope_type": "default"}
    config = hf_config({"full_attention": plain, "sliding_attention": MROPE})
    assert "MRotaryEmbedding" in rope_refusal_from_config(config)
    # LongRoPE by the model's own, longer context.
    config = SimpleNamespace(rope_parameters=LONGROPE, max_position_embeddings=4 * MAX)
    assert f"--context-length {MAX} " in rope_refusal_from_config(config)
    assert rope_refusal_from_config(config, MAX) is None
    assert "no_such_rope" in rope_refusal_from_config(hf_config({"rope_type": "no_such_rope"}))


# --- layers ---------------------------------------------------------------------------------------


def model_of(*ropes):
    """As much of a model as is looked at; ``...`` for a layer that says nothing about RoPE."""
    layers = []
    for number, rope in enumerate(ropes):
        attention = SimpleNamespace(attn=SimpleNamespace(layer_id=number))
        if rope is not ...:
            attention.rotary_emb = rope
        layers.append(SimpleNamespace(self_attn=attention))
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


def test_every_layer_has_its_own_rotation_and_some_have_none():
    from sglang_kvshare.engine.geometry import layer_geometries

    local, wide = rope_of("default"), rope_of("yarn", is_neox_style=False)
    found = layer_geometries(model_of(local, None, wide, local), CONTEXT)
    assert [layer.layer_id for layer in found] == [0, 1, 2, 3]
    first, bare, second, third = (layer.rotation for layer in found)
    assert first is third
    assert bare is None
    assert (first.pairing, first.scale) == ("neox", 1.0)
    assert (second.pairing, second.scale) == ("gptj", wide.mscale)
    assert second.scale > 1
    assert second.table is wide.cos_sin_cache


def test_one_layer_that_cannot_be_moved_is_enough():
    from sglang_kvshare.engine.geometry import Unsupported, layer_geometries

    plain = rope_of("default")
    with pytest.raises(Unsupported, match="MRotaryEmbedding"):
        layer_geometries(model_of(plain, made(rope_scaling=MROPE)), CONTEXT)
    with pytest.raises(Unsupported, match=r"layer 1 .* no rotary_emb"):
        layer_geometries(model_of(plain, ...), CONTEXT)
    assert len(layer_geometries(model_of(plain, plain), CONTEXT)) == 2


# --- pools ----------------------------------------------------------------------------------------


def pool_of(dtype, **settings):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    settings = {"head_dim": 16, "layer_num": 2, **settings}
    return MHATokenToKVPool(
        size=64,
        page_size=1,
        dtype=dtype,
        head_num=2,
        device="cpu",
        enable_memory_saver=False,
        **settings,
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_a_pool_that_is_known_passes(dtype):
    from sglang_kvshare.engine.geometry import check_pool

    check_pool(pool_of(dtype))


def test_every_other_pool_is_refused_by_name(monkeypatch):
    from sglang.srt.mem_cache import memory_pool

    from sglang_kvshare.engine.geometry import Unsupported, check_pool

    def text_of(pool):
        with pytest.raises(Unsupported) as refusal:
            check_pool(pool)
        return str(refusal.value)

    for name in ("MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8", "PageMajorMHATokenToKVPool"):
        kind = getattr(memory_pool, name)
        assert name in text_of(kind.__new__(kind))
    assert "float8_e4m3fnuz" in text_of(pool_of(torch.float8_e4m3fnuz))

    class NVFP4KVMethod:
        def needs_plain_kv_dequant_read(self):
            return False

    quantised = pool_of(torch.float32)
    quantised.quant_method = NVFP4KVMethod()
    assert "NVFP4KVMethod" in text_of(quantised)
    assert "layout page_major" in text_of(pool_of(torch.float32, kv_cache_layout="page_major"))
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "layout hnd" in text_of(pool_of(torch.float32))


def kv_dtype_refusals(value):
    from sglang_kvshare.engine.support import ARGUMENT_REFUSALS

    mine = [refusal for refusal in ARGUMENT_REFUSALS if "--kv-cache-dtype" in refusal.what]
    return [r.what for r in mine if r.applies(SimpleNamespace(kv_cache_dtype=value))]


@pytest.mark.parametrize("value", ["nvfp4", "fp4_mx_block16", "mxfp8"])
def test_a_kv_cache_dtype_that_is_not_known_is_refused_by_name(value):
    assert value in kv_dtype_refusals(value)[0]
    assert kv_dtype_refusals("something_new")


@pytest.mark.parametrize("value", ["auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_a_kv_cache_dtype_that_is_known_is_not_refused(value):
    assert kv_dtype_refusals(value) == []
