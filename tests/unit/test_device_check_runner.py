"""The model runner of the device check: in full, and narrowed, each against a slower definition."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
from flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper, made

from kvshare_eval.device.kv_pool import KVPool, PoolBackend
from kvshare_eval.device.model_shapes import TINY, ModelShape
from kvshare_eval.device.model_weights import converted, random_weights, weights_of
from kvshare_eval.device.reusing import CHECK_LAYER, PROBE_TOKENS, Reuse
from kvshare_eval.device.runner import Runner, rotary_table
from sglang_kvshare.attention.launch_choice import AttentionCosts
from sglang_kvshare.engine.flashinfer_rows import FlashInferRows
from sglang_kvshare.plan import ReusePlan, Span

pytestmark = pytest.mark.unit
SHAPE = TINY
WEIGHTS = random_weights(SHAPE, torch.float32, "cpu", seed=3)
TOKENS, HEAD, PASSAGES, TAIL = 160, 7, ((90, 60), (30, 50)), 43


def drawn(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE.vocabulary, (count,), generator=generator)


class Case:
    """A donor, and a prompt that takes two passages of it, in the other order.

    Attributes:
        passages: start in the donor and length of each, in the order of the prompt.
    """

    def __init__(self, passages=PASSAGES, head=HEAD, tail=TAIL, same=False, rows=None):
        self.pool = KVPool(SHAPE, 2 * TOKENS, torch.float32, "cpu", seed=5)
        attention = None if rows is None else rows(PoolBackend.of(self.pool))
        self.runner = Runner(WEIGHTS, self.pool, 4 * TOKENS, attention)
        self.donor = drawn(TOKENS, 1)
        parts = [self.donor[:head] if same else drawn(head, 2)]
        spans, at = [], head
        self.donor_slots = self.pool.take(TOKENS)
        for source, length in passages:
            parts.append(self.donor[source : source + length])
            slots = self.donor_slots[source : source + length].numpy()
            spans.append(Span(at, source, slots))
            at += length
        parts.append(drawn(tail, 4))
        self.prompt = torch.cat(parts)
        self.plan = ReusePlan(len(self.prompt), 0, tuple(spans))
        self.slots = self.pool.take(len(self.prompt))
        self.runner.prefill(self.donor, self.donor_slots)

    def full(self):
        return self.runner.prefill(self.prompt, self.slots).logits

    def narrowed(self, ratio, check_layer, **more):
        return self.runner.prefill(
            self.prompt, self.slots, Reuse(self.plan, ratio, check_layer, **more)
        )


def near(found, wanted, atol=1e-4):
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=1e-4)


# --- in full --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_in_full_it_is_llama(tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SHAPE.vocabulary,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.query_heads,
            num_key_value_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            rope_theta=SHAPE.rope_theta,
            rms_norm_eps=SHAPE.norm_eps,
            max_position_embeddings=4 * TOKENS,
            tie_word_embeddings=tied,
            # Larger than usual, so that a wrong place of anything shows.
            initializer_range=0.2,
        )
    ).eval()
    weights = weights_of(SHAPE, {name: x.detach() for name, x in model.state_dict().items()})
    pool = KVPool(SHAPE, TOKENS, torch.float32, "cpu")
    prompt = drawn(TOKENS, 8)
    found = Runner(weights, pool, TOKENS).prefill(prompt, pool.take(TOKENS)).logits
    with torch.inference_mode():
        wanted = model(prompt[None]).logits[0, -1]
    near(found, wanted)
    assert wanted.std() > 0.1


def test_the_keys_that_are_left_in_the_pool_are_those_of_their_positions():
    case = Case()
    case.full()
    keys, _ = slow_kv(case.prompt)
    for layer in range(SHAPE.layers):
        near(case.pool.keys[layer][case.slots], keys[layer])


# --- narrowed, with what would have been computed -------------------------------------------------


@pytest.mark.parametrize("check_layer", [None, 0, CHECK_LAYER])
@pytest.mark.parametrize("ratio", [1e-6, 0.2, 1.0])
def test_with_exact_donors_it_is_the_prefill_in_full(check_layer, ratio):
    """The donor is the prompt's own beginning: at the same positions, behind the same tokens."""
    case = Case(passages=((HEAD, 100),), same=True)
    wanted = case.full()
    # Nothing of it stays in the prompt's own slots.
    for buffer in (*case.pool.keys, *case.pool.values):
        buffer[case.slots] = 1e3
    told = case.narrowed(ratio, check_layer)
    assert told.finite
    near(told.logits, wanted)
    spared = case.plan.matched_tokens - int(told.recompute.sum())
    assert (spared == 0) == (ratio == 1.0)
    assert len(told.positions) == len(case.prompt) - spared


def test_all_recomputed_is_the_prefill_in_full_whatever_the_donors():
    case = Case()
    wanted = case.full()
    for check_layer in (None, CHECK_LAYER):
        near(case.narrowed(1.0, check_layer).logits, wanted)
    # The control: with other donors it matters what is spared.
    assert (case.narrowed(1e-6, None).logits - wanted).abs().max() > 0.01


def test_rows_are_told_layer_by_layer():
    case = Case()
    tokens, matched = len(case.prompt), case.plan.matched_tokens
    before = case.narrowed(0.2, None)
    left = tokens - matched + int(before.recompute.sum())
    assert before.rows_in == before.rows_out == (left,) * SHAPE.layers
    assert int(before.recompute.sum()) == 22
    there = case.narrowed(0.2, 2)
    left = tokens - matched + int(there.recompute.sum())
    assert there.rows_in == (tokens, tokens, tokens, left)
    assert there.rows_out == (tokens, tokens, left, left)


def test_a_fault_of_a_donor_is_told():
    case = Case()
    assert case.narrowed(0.2, None).finite
    case.pool.values[2][case.donor_slots[40]] = float("nan")
    assert not case.narrowed(0.2, None).finite


# --- narrowed, with donors of other places --------------------------------------------------------


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 0.3])
@pytest.mark.parametrize("check_layer", [None, CHECK_LAYER, 2])
def test_with_donors_of_other_offsets_it_is_what_the_definition_says(check_layer, ratio):
    case = Case()
    told = case.narrowed(ratio, check_layer)
    logits, kept, keys, values = slow_narrowed(case, ratio, check_layer)
    assert told.positions.tolist() == kept
    near(told.logits, logits)
    for layer in range(SHAPE.layers):
        near(case.pool.keys[layer][case.slots], keys[layer])
        near(case.pool.values[layer][case.slots], values[layer])


def over_the_stand_in(costs, backend):
    def wrapper():
        return BatchPrefillWithPagedKVCacheWrapper(
            backend.workspace_buffer, "NHD", backend=backend.prefill_backend
        )

    return FlashInferRows(backend, wrapper, costs)


@pytest.mark.parametrize("check_layer", [None, CHECK_LAYER])
def test_flashinfers_adapter_gives_the_same(check_layer):
    """Over the stand-in of its wrapper, in each form."""
    plain = Case().narrowed(0.2, check_layer)
    forms = (
        AttentionCosts(masked=1e9),
        AttentionCosts(launch_ns=1e12),
        AttentionCosts(launch_ns=0, mask_limit_tokens=0, row_ns=0.0),
    )
    for costs in forms:
        made()

        told = Case(rows=partial(over_the_stand_in, costs)).narrowed(0.2, check_layer)
        near(told.logits, plain.logits)
        assert sum(wrapper.runs for wrapper in made()) >= SHAPE.layers - 1


def test_half_precision_is_near():
    shape: ModelShape = SHAPE
    half = converted(WEIGHTS, torch.bfloat16, "cpu")
    pool = KVPool(shape, TOKENS, torch.bfloat16, "cpu")
    found = Runner(half, pool, TOKENS).prefill(drawn(TOKENS, 8), pool.take(TOKENS)).logits
    wide = KVPool(shape, TOKENS, torch.float32, "cpu")
    widened = converted(half, torch.float32, "cpu")
    wanted = Runner(widened, wide, TOKENS).prefill(drawn(TOKENS, 8), wide.take(TOKENS)).logits
    assert (found - wanted).norm() < 0.05 * wanted.norm()


# --- the definition, in fp64, row by row ----------------------------------------------------------


def turned(heads, positions):
    """Pairs of dimensions as complex numbers, turned by the angles of the fp32 table."""
    half = SHAPE.head_dim // 2
    table = rotary_table(SHAPE, 4 * TOKENS, "cpu")[positions].double()
    turn = torch.complex(table[:, :half], table[:, half:])[:, None]
    out = torch.complex(heads[..., :half], heads[..., half:]) * turn
    return torch.cat([out.real, out.imag], -1)


def moved(keys, source, target):
    half = SHAPE.head_dim // 2
    table = rotary_table(SHAPE, 4 * TOKENS, "cpu").double()
    turns = torch.complex(table[:, :half], table[:, half:])
    turn = (turns[target] * turns[source].conj())[:, None]
    out = torch.complex(keys[..., :half], keys[..., half:]) * turn
    return torch.cat([out.real, out.imag], -1)


def norm(x, weight):
    return x / (x.square().mean(1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight.double()


def projected(layer, x, positions):
    heads = norm(x, layer.attention_norm) @ layer.qkv.double().T
    heads = heads.view(len(x), -1, SHAPE.head_dim)
    q, k, v = heads.split((SHAPE.query_heads, SHAPE.kv_heads, SHAPE.kv_heads), 1)
    return turned(q, positions), turned(k, positions), v


def looking_weights(q, keys, positions):
    """fp64 ``[rows, query_heads, tokens]``, from a mask that is written down in full."""
    seen = keys.repeat_interleave(SHAPE.group, 1)
    logits = torch.einsum("rhd,khd->rhk", q, seen) * SHAPE.head_dim**-0.5
    hidden = torch.arange(len(keys)) > positions[:, None]
    return logits.masked_fill(hidden[:, None], float("-inf")).softmax(2)


def attended(q, keys, values, positions):
    seen = values.repeat_interleave(SHAPE.group, 1)
    return torch.einsum("rhk,khd->rhd", looking_weights(q, keys, positions), seen).flatten(1)


def rest(layer, x, attention):
    x = x + attention @ layer.output.double().T
    gate, up = (norm(x, layer.feed_norm) @ layer.gate_up.double().T).chunk(2, 1)
    return x + (gate * torch.sigmoid(gate) * up) @ layer.down.double().T


def slow_kv(tokens):
    """fp64 keys and values of each layer when all rows run."""
    x, positions = WEIGHTS.embedding[tokens].double(), torch.arange(len(tokens))
    keys, values = [], []
    for layer in WEIGHTS.layers:
        q, k, v = projected(layer, x, positions)
        x = rest(layer, x, attended(q, k, v, positions))
        keys.append(k)
        values.append(v)
    return keys, values


@cache
def donors_kv():
    return slow_kv(drawn(TOKENS, 1))


def slow_narrowed(case, ratio, check_layer):
    """Logits, positions that are left, and keys and values of each layer of the prompt."""
    plan, count = case.plan, len(case.prompt)
    donor_keys, donor_values = donors_kv()
    matched = [p for span in plan.spans for p in range(span.start, span.end)]
    source = [span.source + n for span in plan.spans for n in range(span.length)]
    seams = [p for span in plan.spans for p in range(span.start, span.start + 8)]
    x, positions = WEIGHTS.embedding[case.prompt].double(), torch.arange(count)
    if check_layer is None:
        wide = [
            p
            for span in plan.spans
            for p in range(span.start, span.start + max(8, int(np.ceil(ratio * span.length))))
        ]
        positions = torch.tensor([p for p in range(count) if p not in matched or p in wide])
        x = x[positions]
    keys, values = [], []
    for number, layer in enumerate(WEIGHTS.layers):
        q, k, v = projected(layer, x, positions)
        all_keys = torch.zeros(count, SHAPE.kv_heads, SHAPE.head_dim, dtype=torch.float64)
        all_values = all_keys.clone()
        all_keys[matched] = moved(donor_keys[number][source], source, matched)
        all_values[matched] = donor_values[number][source]
        if number == check_layer:
            looking = [p for p in range(count) if p not in matched or p in seams][-PROBE_TOKENS:]
            mass = looking_weights(q[looking], k, positions[looking]).mean(1).sum(0)
            off = (all_values - v).abs().sum((1, 2))
            open_ = sorted(
                (p for p in matched if p not in seams), key=lambda p: -float(mass[p] * off[p])
            )
            more = max(0, int(np.ceil(ratio * len(matched))) - len(seams))
            chosen = {*seams, *open_[:more]}
        all_keys[positions], all_values[positions] = k, v
        if number == check_layer:
            left = torch.tensor([p for p in range(count) if p not in matched or p in chosen])
            x, q, positions = x[left], q[left], left
        keys.append(all_keys)
        values.append(all_values)
        x = rest(layer, x, attended(q, all_keys, all_values, positions))
    logits = norm(x[-1:], WEIGHTS.norm)[0] @ WEIGHTS.head.double().T
    return logits, positions.tolist(), keys, values
