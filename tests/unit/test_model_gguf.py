"""The converter, on a tiny GGUF file whose original weights and vocabulary are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.gguf import convert, expected_shapes, hf_name, open_gguf, unpermute

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.torch")
tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 4, 2, 16, 2
HIDDEN, INNER = HEADS * HEAD_SIZE, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_letters() -> list[str]:
    """The printable letter that GPT-2's byte-level BPE uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain}
    letter |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]


TOKENS = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def slow_permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of a projection's rows, row by row."""
    size = rows.shape[0] // heads
    permuted = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            for side in range(2):
                source = head * size + side * (size // 2) + pair
                permuted[head * size + 2 * pair + side] = rows[source]
    return permuted


def original_weights(tied: bool = True) -> dict[str, np.ndarray]:
    """Random fp32 weights under GGUF's names, rows in Hugging Face's order."""
    random = np.random.default_rng(7)
    query, key = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN)}
    shapes["output_norm"] = (HIDDEN,)
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.attn_norm": (HIDDEN,), f"{block}.ffn_norm": (HIDDEN,)}
        shapes |= {f"{block}.attn_q": (query, HIDDEN), f"{block}.attn_output": (HIDDEN, query)}
        shapes |= {f"{block}.attn_k": (key, HIDDEN), f"{block}.attn_v": (key, HIDDEN)}
        shapes |= {f"{block}.ffn_gate": (INNER, HIDDEN), f"{block}.ffn_up": (INNER, HIDDEN)}
        shapes |= {f"{block}.ffn_down": (HIDDEN, INNER)}
    return {
        f"{name}.weight": random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    scaling: bool = False,
    quantised: bool = False,
) -> Path:
    """A tiny llama model as llama.cpp's tools would write it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_SIZE)
    if scaling:
        writer.add_rope_scaling_factor(4.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, array in (original_weights() if weights is None else weights).items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            array = slow_permute(array, HEADS if "attn_q" in name else KV_HEADS)
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path, **options: Any) -> Path:
    """The folder that the converter makes of the file."""
    folder = path.with_suffix(".hf")
    folder.mkdir()
    convert(open_gguf(path), folder, **options)
    return folder


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (1, 8), (3, 64), (9, 4)])
def test_unpermute_is_the_inverse_of_the_permutation(heads: int, size: int) -> None:
    rows = np.arange(heads * size * 5, dtype=np.float32).reshape(heads * size, 5)
    permuted = slow_permute(rows, heads)
    assert heads * size == 2 or not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


@pytest.mark.parametrize("tied", [True, False])
def test_fp32_weights_come_back_exactly(tmp_path: Path, tied: bool) -> None:
    weights = original_weights(tied)
    folder = converted(write_gguf(tmp_path / "m.gguf", weights), dtype="float32")
    got = safetensors.load_file(folder / "model.safetensors")
    assert set(got) == {hf_name(name) for name in weights}
    for name, array in weights.items():
        assert np.array_equal(got[hf_name(name)].numpy(), array), name
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert {name: tuple(t.shape) for name, t in got.items()} == expected_shapes(config)


def test_weights_are_bfloat16_by_default(tmp_path: Path) -> None:
    weights = original_weights()
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    got = safetensors.load_file(folder / "model.safetensors")
    for name, array in weights.items():
        assert torch.equal(got[hf_name(name)], torch.from_numpy(array).bfloat16()), name


def test_quantised_weights_come_back_within_half_a_step(tmp_path: Path) -> None:
    weights = original_weights()
    folder = converted(write_gguf(tmp_path / "m.gguf", quantised=True), dtype="float32")
    got = safetensors.load_file(folder / "model.safetensors")
    for name, array in weights.items():
        if array.ndim == 2:
            blocks = array.reshape(-1, 32)
            step = (blocks.max(1) - blocks.min(1)) / 15
            error = np.abs(got[hf_name(name)].numpy() - array).reshape(-1, 32).max(1)
            # The scale and the minimum are stored in fp16.
            assert (error <= step / 2 + 0.01).all(), name


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    "text",
    ["the theatre", "  two  spaces", "naïve 你好 🙂", "line\n\ttab\r\n", "it's 123 <tag>", ""],
)
def test_tokenizer_round_trips(tmp_path: Path, text: str) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    # The ids are the file's own: its pieces, put together, are the bytes of the text.
    letters = byte_letters()
    pieces = "".join(TOKENS[index] for index in encoded.ids)
    assert bytes(letters.index(letter) for letter in pieces).decode() == text


def test_tokenizer_merges_digits_and_special_tokens(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("the the").tokens == ["t", "he", "Ġthe"]
    # Digits stand alone even where a merge would join them.
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert tokenizer.encode("<|im_start|>he<|im_end|>").ids == [1, TOKENS.index("he"), 2]
    assert tokenizer.decode([1, TOKENS.index("he"), 2]) == "he"


def test_tokenizer_config_holds_the_chat_template(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert config["unk_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"pre": "llama-bpe"}, "gpt2/llama-bpe"),
        ({"scaling": True}, r"llama\.rope\.scaling\.factor"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError, match=message):
        converted(path)


def test_missing_unknown_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    weights = original_weights()
    lacking = {name: array for name, array in weights.items() if name != "blk.1.attn_v.weight"}
    with pytest.raises(ModelError, match=r"lacks 1 tensors.*layers\.1\.self_attn\.v_proj"):
        converted(write_gguf(tmp_path / "a.gguf", lacking))
    unknown = weights | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        converted(write_gguf(tmp_path / "b.gguf", unknown))
    cut = weights | {"blk.0.ffn_up.weight": np.zeros((INNER - 1, HIDDEN), np.float32)}
    with pytest.raises(ModelError, match=r"ffn_up\.weight has shape \(95, 64\)"):
        converted(write_gguf(tmp_path / "c.gguf", cut))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no model " * 20)
    with pytest.raises(ModelError, match="no GGUF file"):
        open_gguf(path)
    assert isinstance(open_gguf(write_gguf(tmp_path / "good.gguf")), gguf.GGUFReader)
