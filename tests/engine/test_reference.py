"""The tests' own oracle against Hugging Face's models, and against itself."""

from __future__ import annotations

import pytest
import torch
from prompts import Book
from reference import Match, Reference, spared_positions
from tiny_models import CONTEXT, MODELS

from kvshare_eval.simulate.plain_model import PlainModel

pytestmark = pytest.mark.engine

SERVED = ("llama", "llama3_rope", "linear_rope", "mistral", "qwen2", "qwen3", "glm4")


@pytest.mark.parametrize("name", SERVED)
def test_the_reference_computes_what_transformers_computes(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS[name].write(tmp_path), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = Book(1).passage(300)
    # Hugging Face stretches dynamic NTK to the length at hand, SGLang to the longest that there
    # may be: the same at the end of the longest (only distances matter otherwise).
    end = CONTEXT * MODELS[name].rope_scaling["factor"] if name == "qwen2" else len(tokens)
    positions = torch.arange(end - len(tokens), end).unsqueeze(0)
    with torch.no_grad():
        output = model(torch.tensor([tokens]), position_ids=positions)
    expected = output.logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(
        Reference(MODELS[name]).full(tokens).logprobs(), expected, atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_model_of_the_experiments_computes_the_same(name, tmp_path):
    plain = PlainModel(MODELS[name].write(tmp_path))
    tokens = Book(4).passage(120)
    told, _ = plain.run(tokens, torch.arange(120), plain.empty(120), logits_from=0)
    expected = Reference(MODELS[name]).all_logprobs(tokens)
    torch.testing.assert_close(told, expected, atol=2e-4, rtol=0)


def test_decoding_one_by_one_equals_one_prefill():
    reference = Reference(MODELS["qwen3"])
    tokens = Book(2).passage(60)
    row = reference.approximate(tokens[:40], {}, 0)
    for token in tokens[40:]:
        reference.decode(row, token)
    torch.testing.assert_close(row.logits, reference.full(tokens).logits, atol=1e-4, rtol=0)


def test_a_donor_with_the_same_context_changes_nothing_and_another_context_does():
    reference = Reference(MODELS["llama"])
    tokens = Book(3).passage(80)
    full = reference.full(tokens).logprobs()
    same = {p: (tuple(tokens[:70]), p) for p in range(20, 60)}
    torch.testing.assert_close(
        reference.approximate(tokens, same, 0).logprobs(), full, atol=1e-4, rtol=0
    )
    moved = {p: (tuple(tokens[15:70]), p - 15) for p in range(20, 60)}
    assert (reference.approximate(tokens, moved, 0).logprobs() - full).abs().max() > 0.05


def test_layers_before_the_narrow_one_are_fresh():
    reference = Reference(MODELS["llama"])
    tokens = Book(4).passage(50)
    spared = {p: (tuple(tokens[15:40]), p - 15) for p in range(20, 40)}
    row = reference.approximate(tokens, spared, 2)
    full = reference.full(tokens)
    for layer in (0, 1):
        torch.testing.assert_close(row.keys[layer], full.keys[layer])
    assert not torch.allclose(row.keys[2], full.keys[2], atol=1e-3)


def test_the_selection_by_hand():
    match = Match(start=10, source=3, length=40, donor=tuple(range(100)))
    settings = {"seam_tokens": 8, "tail_tokens": 5}
    assert len(spared_positions([match], 52, ratio=0, **settings)) == 40
    assert spared_positions([match], 52, ratio=1, **settings) == {}
    some = spared_positions([match], 52, ratio=0.05, **settings)
    # Seam 10..17; the tail 47..51 holds the span's last three.
    assert sorted(some) == list(range(18, 47))
    assert some[18] == (match.donor, 11)
    wide = spared_positions([match], 60, ratio=0.5, **settings)
    assert sorted(wide) == list(range(30, 50))
