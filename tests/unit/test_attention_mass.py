"""Attention mass and influence against their definitions, row by row and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.attention_mass import (
    BLOCK_ROWS,
    attend_and_weigh,
    attention_mass,
    influence,
)
from sglang_kvshare.attention.position_mask import attend

pytestmark = pytest.mark.unit


def case(rows, tokens, kv_heads=2, group=3, dim=8, seed=0):
    torch.manual_seed(seed)
    query = torch.randn(rows, kv_heads * group, dim)
    key, value = (torch.randn(tokens, kv_heads, dim) for _ in range(2))
    positions = torch.randperm(tokens)[:rows].sort().values
    return query, key, value, positions, 1 / math.sqrt(dim)


def slow(query, key, value, positions, scale):
    """One row and one head at a time, in double precision."""
    rows, heads, _ = query.shape
    group = heads // key.shape[1]
    out, mass = torch.zeros(rows, heads, value.shape[2]), torch.zeros(key.shape[0])
    for row in range(rows):
        seen = int(positions[row]) + 1
        for head in range(heads):
            keys, values = (each[:seen, head // group].double() for each in (key, value))
            weights = (keys @ query[row, head].double() * scale).softmax(0)
            out[row, head] = (weights @ values).float()
            mass[:seen] += weights.float() / heads
    return out, mass


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3 * BLOCK_ROWS), st.integers(0, 40), st.integers(0, 5))
def test_mass_and_output_equal_their_definition(rows, others, seed):
    given_ = case(rows, rows + others, seed=seed)
    *tensors, scale = given_
    out, mass = attend_and_weigh(*tensors, scale=scale)
    expected_out, expected_mass = slow(*given_)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mass.sum(0), expected_mass, atol=1e-5, rtol=1e-4)
    assert float(mass.sum()) == pytest.approx(rows, rel=1e-4)
    query, key, value, positions = tensors
    torch.testing.assert_close(attention_mass(query, key, positions, scale=scale), mass.sum(0))
    # By key head: those of one group of query heads alone.
    group = query.shape[1] // key.shape[1]
    _, alone = slow(query[:, :group], key[:, :1], value[:, :1], positions, scale)
    torch.testing.assert_close(mass[0], alone * group / query.shape[1], atol=1e-5, rtol=1e-4)


def test_the_output_is_that_of_the_attention_it_stands_for():
    *tensors, scale = case(70, 300)
    out, _ = attend_and_weigh(*tensors, scale=scale)
    torch.testing.assert_close(out, attend(*tensors, scale=scale), atol=1e-5, rtol=1e-4)


def test_a_key_that_no_row_sees_receives_nothing():
    query, key, value, _, scale = case(3, 50)
    _, mass = attend_and_weigh(query, key, value, torch.tensor([4, 9, 30]), scale=scale)
    assert (mass[:, 31:] == 0).all()
    assert (mass[:, :31] > 0).all()


def test_influence_is_what_a_small_change_does():
    """Along the key and the value of one token at a time."""
    query, key, value, positions, scale = case(5, 12, kv_heads=1, group=1, dim=4, seed=3)
    query, key, value = query.double(), key.double(), value.double()

    def output(keys, values):
        out = torch.zeros(5, 4, dtype=torch.float64)
        for row in range(5):
            seen = int(positions[row]) + 1
            weights = (keys[:seen, 0] @ query[row, 0] * scale).softmax(0)
            out[row] = weights @ values[:seen, 0]
        return out

    small = 1e-6
    change_k, change_v = torch.randn_like(key), torch.randn_like(value)
    told = influence(query, key, value, change_k, change_v, positions, scale=scale)
    for token in range(12):
        one = torch.zeros_like(key)
        one[token] = 1
        moved_k = output(key + small * one * change_k, value) - output(key, value)
        moved_v = output(key, value + small * one * change_v) - output(key, value)
        expected = (moved_k.norm(dim=1) + moved_v.norm(dim=1)).sum() / small
        assert float(told[token]) == pytest.approx(float(expected), rel=1e-3, abs=1e-6)


def test_influence_of_what_did_not_change_is_zero():
    query, key, value, positions, scale = case(40, 90)
    change = torch.zeros_like(key)
    change[10:20] = 1.0
    told = influence(query, key, value, change, change, positions, scale=scale)
    assert (told[:10] == 0).all()
    assert (told[20:] == 0).all()
    assert float(told.sum()) > 0


def test_memory_is_linear_in_the_prompt():
    """No tensor of rows times tokens is made."""
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal biggest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                biggest = max(biggest, result.numel())
            return result

    query, key, value, positions, scale = case(2000, 4000, kv_heads=1, group=1, dim=4)
    with Watch():
        attention_mass(query, key, positions, scale=scale)
        influence(query, key, value, key, value, positions, scale=scale)
    assert biggest <= BLOCK_ROWS * 4000
