"""The plain model of the experiments, and what the experiment on lean makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvshare_eval.simulate import decode, deviation, encodings, fragments, lean, scores, trial
from kvshare_eval.simulate.plain_model import PlainModel

pytestmark = pytest.mark.unit

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 6, 4, 2, 8, 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    folder: Path = tmp_path_factory.mktemp("plain")
    width = HEADS * DIM
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": width,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(VOCAB, width),
        "model.norm.weight": random(width),
    }
    for number in range(LAYERS):
        name = f"model.layers.{number}."
        weights |= {
            f"{name}{norm}.weight": random(width) + 1
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        kv = KV_HEADS * DIM
        for part, rows, columns in [
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", kv, width),
            ("self_attn.v_proj", kv, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", 2 * width, width),
            ("mlp.up_proj", 2 * width, width),
            ("mlp.down_proj", width, 2 * width),
        ]:
            weights[f"{name}{part}.weight"] = random(rows, columns)
    save_file(weights, folder / "model.safetensors")
    return PlainModel(folder)


def passage(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_rows_may_come_in_parts_and_later_tokens_change_nothing(model: PlainModel) -> None:
    ids = passage(1, 30)
    whole, parts = model.empty(30), model.empty(30)
    told, _ = model.run(ids, torch.arange(30), whole, logits_from=0)
    first, _ = model.run(ids, torch.arange(12), parts, logits_from=0)
    rest, _ = model.run(ids, torch.arange(12, 30), parts, logits_from=0)
    assert torch.allclose(told, torch.cat([first, rest]), atol=1e-4)
    other, _ = model.run(
        [*ids[:20], *passage(2, 10)], torch.arange(30), model.empty(30), None, None, 0
    )
    assert torch.allclose(told[:20], other[:20], atol=1e-4)
    assert not torch.allclose(told[20:], other[20:], atol=1e-2)


def test_the_experiment_s_bounds(model: PlainModel) -> None:
    """All recomputed is full recomputation, nothing is not; leans are shares of attention."""
    one, two = passage(5, 24), passage(6, 24)
    donor = trial.donor_of(model, [*passage(7, 5), *one, *passage(8, 3), *two, *passage(9, 4)])
    prompt = [*passage(10, 6), *two, *passage(11, 2), *one, *passage(12, 5)]
    found = trial.reused(donor, prompt)
    assert found.positions.tolist() == [*range(6, 30), *range(32, 56)]
    assert found.sources.tolist() == [*range(32, 56), *range(5, 29)]
    truth = trial.truth_of(model, prompt)
    placed = trial.Trial(model, truth, [(donor, found)])
    assert placed.divergence(found.positions) == pytest.approx(0, abs=1e-5)
    assert placed.divergence(np.empty(0, dtype=np.int64)) > 1e-3
    for shares in found.leans.values():
        assert ((shares >= 0) & (shares <= 1)).all()
    # The passage that stood later in the donor had more to lean on.
    assert found.leans[trial.ALL][:24].sum() > found.leans[trial.ALL][24:].sum()
    assert len(placed.best(found.leans[trial.ALL])) == 10


def test_a_preference_takes_each_span_from_one_donor(model: PlainModel) -> None:
    one, two = passage(5, 24), passage(6, 24)
    first = trial.donor_of(model, [*one, *passage(8, 3), *two, 1])
    second = trial.donor_of(model, [*two, *passage(9, 3), *one, 2])
    prompt = [*passage(10, 2), *two, *passage(11, 2), *one, *passage(12, 5)]
    options = [(donor, trial.reused(donor, prompt)) for donor in (first, second)]
    for name, expected in [
        ("closest position", [second, second]),
        ("later source", [first, second]),
    ]:
        chosen = lean.preferring(options, lean.PREFERENCES[name])
        # In the order of the first donor's spans: the prompt's.
        assert [donor is want for (donor, _), want in zip(chosen, expected, strict=True)] == [
            True
        ] * 2
        positions = np.concatenate([part.positions for _, part in chosen])
        assert positions.tolist() == [*range(2, 26), *range(28, 52)]


def test_fragments_do_not_overlap_and_every_way_is_measured(model: PlainModel) -> None:
    pieces = [passage(20 + number, 16 + 4 * number) for number in range(5)]
    donors = [trial.donor_of(model, [*piece, 1]) for piece in [*pieces, pieces[0]]]
    prompt = [token for piece in pieces for token in (2, *piece)] + [3, 4, 5]
    told = fragments.measure(model, prompt, donors)
    assert told is not None
    assert len(told) == 1 + 4 * len(fragments.RATIOS)
    assert all(kl >= -1e-6 for kl in told.values())
    assert fragments.measure(model, prompt, donors[:3]) is None


def test_refreshing_all_in_order_leaves_nothing_and_none_is_what_one_pass_gives(
    model: PlainModel,
) -> None:
    piece = passage(30, 24)
    source = trial.donor_of(model, [*passage(31, 5), *piece, 1])
    prompt = [*passage(32, 3), *piece, *passage(33, 5)]
    found = trial.reused(source, prompt)
    placed = trial.Trial(model, trial.truth_of(model, prompt, 8), [(source, found)])
    nothing = np.empty(0, dtype=np.int64)
    plain = placed.decoded(nothing, nothing, 0)
    assert len(plain) == 8
    assert np.mean(plain) == pytest.approx(placed.divergence(nothing), abs=1e-5)
    # In order of position, all behind the first token: from then on everything rests on exact
    # values, but for the prompt's own rows behind the passage.
    refreshed = placed.decoded(nothing, np.arange(found.positions[0], len(prompt)), 64)
    assert refreshed[0] == pytest.approx(plain[0], abs=1e-6)
    assert max(refreshed[1:]) < 1e-5 < max(plain[1:])
    left = scores.measure(model, prompt, [*passage(31, 5), *piece, 1], 0.5)
    assert left is not None
    assert set(left) == {"none", *scores.SCORES}
    told = decode.measure(model, prompt, [*passage(31, 5), *piece, 1], 6)
    assert told is not None
    assert all(len(kl) == 6 for kl in told.values())


def test_deviation_is_nothing_in_the_same_context_and_at_layer_0(model: PlainModel) -> None:
    piece = passage(40, 40)
    same, other = [*passage(41, 5), *piece, 1], [*passage(42, 5), *piece, 1]
    # The same tokens up to the last: all of it is an exact prefix, and nothing is left to reuse.
    assert deviation.deviations(model, [*passage(41, 5), *piece, 2], [same]) == []
    ((first, *others),) = deviation.deviations(model, [*passage(41, 5), *piece, 2], [other])
    assert first == pytest.approx(0, abs=1e-5)
    assert len(others) == LAYERS - 1
    assert min(others) > 0.01


def test_an_encoding_is_measured_over_all_of_its_donors(model: PlainModel) -> None:
    pieces = [passage(50, 20), passage(51, 20)]
    prompt = [1, *pieces[0], 2, *pieces[1], 3, 4]
    truth = trial.truth_of(model, prompt)
    alone = [[*piece, 5] for piece in pieces]
    found = encodings.measure(model, truth, alone, 1.0)
    assert found is not None
    nothing, everything = found
    assert nothing > 1e-3
    assert everything == pytest.approx(0, abs=1e-5)
    assert encodings.measure(model, truth, [passage(52, 20)], 0.5) is None
