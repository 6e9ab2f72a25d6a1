"""The scores of the check layer under Triton's interpreter, against definitions in fp64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.kernels.check_scores import TOLD, CheckLayer, check_scores

PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
    (torch.float32, torch.bfloat16),
)


def layer_of(
    dtype, pool_dtype, heads, dims, tokens, prefix, probes, reused, scales=(1.0, 1.0), seed=0
):
    """All behind the prefix runs; the rows of another request stand before them, and queries, keys
    and values are parts of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    (query_heads, kv_heads), (key_dim, value_dim) = heads, dims
    before, rows = 3, tokens - prefix
    widths = query_heads * key_dim, kv_heads * key_dim, kv_heads * value_dim
    together = torch.randn(before + rows, sum(widths), generator=generator).to(dtype)
    q, k, v = together.split(widths, dim=1)
    slots = tokens + 20
    fresh_rows = torch.full((tokens,), -1, dtype=torch.int32)
    fresh_rows[prefix:] = before + torch.arange(rows, dtype=torch.int32)
    behind = torch.randperm(rows, generator=generator)[:reused].sort().values + prefix
    return CheckLayer(
        query=q.unflatten(1, (query_heads, key_dim)),
        fresh_keys=k.unflatten(1, (kv_heads, key_dim)),
        fresh_values=v.unflatten(1, (kv_heads, value_dim)),
        stored_keys=torch.randn(slots, kv_heads, key_dim, generator=generator).to(pool_dtype),
        stored_values=torch.randn(slots, kv_heads, value_dim, generator=generator).to(pool_dtype),
        slots=torch.randperm(slots, generator=generator)[:tokens],
        fresh_rows=fresh_rows,
        probe_rows=torch.arange(before + rows - probes, before + rows),
        probe_positions=torch.arange(tokens - probes, tokens),
        reused=behind,
        scale=key_dim**-0.5,
        key_scale=scales[0],
        value_scale=scales[1],
    )


def slowly(layer):
    """One token, one probe and one head at a time."""
    kv_heads = layer.fresh_keys.shape[1]
    group = layer.query.shape[1] // kv_heads
    stored_k = layer.stored_keys.float().double()[layer.slots] * layer.key_scale
    stored_v = layer.stored_values.float().double()[layer.slots] * layer.value_scale
    keys = stored_k.clone()
    for position, row in enumerate(layer.fresh_rows.tolist()):
        if row >= 0:
            keys[position] = layer.fresh_keys[row].double()
    mass = torch.zeros(len(layer.slots), dtype=torch.float64)
    for row, position in zip(
        layer.probe_rows.tolist(), layer.probe_positions.tolist(), strict=True
    ):
        for head in range(group * kv_heads):
            logits = keys[: position + 1, head // group] @ layer.query[row, head].double()
            mass[: position + 1] += (logits * layer.scale).softmax(0) / (group * kv_heads)
    told = {name: [] for name in TOLD}
    for position in layer.reused.tolist():
        row = int(layer.fresh_rows[position])
        key, value = layer.fresh_keys[row].double(), layer.fresh_values[row].double()
        told["attention"].append(mass[position])
        told["value_l1"].append((stored_v[position] - value).abs().sum())
        told["value_l2"].append((stored_v[position] - value).square().sum())
        told["value_size"].append(value.abs().sum())
        told["key_l2"].append((stored_k[position] - key).square().sum())
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in told.items()}


@settings(deadline=None, max_examples=9, database=None)
@given(
    pair=st.sampled_from(PAIRS),
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4)]),
    dims=st.sampled_from([(8, 8), (24, 12), (16, 20)]),
    prefix=st.integers(0, 20),
    rows=st.integers(1, 36),
    data=st.data(),
)
def test_scores_equal_their_definitions(pair, heads, dims, prefix, rows, data):
    probes = data.draw(st.integers(0, min(rows, 20)))
    reused = data.draw(st.integers(0, rows))
    scales = (0.5, 0.25) if pair[1].itemsize == 1 else (1.0, 1.0)
    seed = data.draw(st.integers(0, 99))
    layer = layer_of(*pair, heads, dims, prefix + rows, prefix, probes, reused, scales, seed)
    expected = slowly(layer)
    for kernel in (True, False):
        told = check_scores(layer, kernel=kernel)
        for name in TOLD:
            torch.testing.assert_close(
                getattr(told, name).double(), expected[name], rtol=2e-5, atol=2e-6, msg=name
            )


def test_many_splits_of_the_keys():
    layer = layer_of(torch.float32, torch.float32, (2, 1), (8, 8), 700, 30, 5, 40)
    expected = slowly(layer)
    told = check_scores(layer, kernel=True)
    torch.testing.assert_close(told.attention.double(), expected["attention"], rtol=2e-5, atol=1e-7)
    # The control: without the prefix the attention is another.
    alone = layer_of(torch.float32, torch.float32, (2, 1), (8, 8), 670, 0, 5, 40)
    assert not torch.allclose(check_scores(alone, kernel=True).attention, told.attention, rtol=0.01)


def test_all_attention_is_told_of_when_all_are_asked_for():
    layer = layer_of(torch.bfloat16, torch.bfloat16, (6, 2), (8, 8), 50, 0, 7, 50)
    told = check_scores(layer, kernel=True)
    torch.testing.assert_close(told.attention.sum(), torch.tensor(7.0), rtol=1e-5, atol=0)


def test_what_is_not_a_number_in_the_pool_is_told_of_its_token_alone():
    """A faulty donor is over every limit; what is fresh is what is attended to."""
    layer = layer_of(torch.float32, torch.float32, (2, 1), (8, 8), 30, 4, 5, 12)
    bad = 6
    layer.stored_values[layer.slots[layer.reused[bad]], 0, 3] = float("nan")
    told = check_scores(layer, kernel=True)
    assert told.value_l1.isnan().nonzero().flatten().tolist() == [bad]
    assert told.value_l2.isnan().nonzero().flatten().tolist() == [bad]
    assert told.attention.isfinite().all()
    assert told.key_l2.isfinite().all()
