"""Attention by position against the definition, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.position_mask import attend, last_positions

pytestmark = pytest.mark.unit


def slow_attention(query, key, value, positions, scale):
    out = []
    group = query.shape[1] // key.shape[1]
    for row, position in enumerate(positions.tolist()):
        heads = []
        for head in range(query.shape[1]):
            keys, values = key[: position + 1, head // group], value[: position + 1, head // group]
            weights = torch.softmax(keys @ query[row, head] * scale, dim=0)
            heads.append(weights @ values)
        out.append(torch.stack(heads))
    return torch.stack(out)


def random_case(seed, tokens, rows, query_heads, kv_heads):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    positions = torch.randperm(tokens, generator=generator)[:rows].sort().values
    return (
        draw(rows, query_heads, 8),
        draw(tokens, kv_heads, 8),
        draw(tokens, kv_heads, 8),
        positions,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.data(),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([1, 3, 16, 64]),
)
def test_it_equals_the_definition(seed, tokens, data, heads, block_rows):
    rows = data.draw(st.integers(1, tokens))
    query, key, value, positions = random_case(seed, tokens, rows, *heads)
    expected = slow_attention(query, key, value, positions, 0.3)
    found = attend(query, key, value, positions, scale=0.3, block_rows=block_rows)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_row_sees_nothing_after_its_position():
    query, key, value, positions = random_case(1, 40, 12, 4, 2)
    before = attend(query, key, value, positions, scale=0.3)
    cut = 20
    key[cut:], value[cut:] = 100.0, -1e4
    after = attend(query, key, value, positions, scale=0.3)
    seen = positions < cut
    assert seen.any()
    assert torch.equal(before[seen], after[seen])
    # The control: rows from there on do see the change.
    assert not torch.equal(before[~seen], after[~seen])


def test_all_rows_equal_plain_causal_attention():
    query, key, value, positions = random_case(2, 50, 50, 4, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query.movedim(0, 1)[None],
        key.movedim(0, 1)[None],
        value.movedim(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
        scale=0.3,
    )[0].movedim(0, 1)
    torch.testing.assert_close(attend(query, key, value, positions, scale=0.3), plain)


def test_block_ends():
    positions = torch.tensor([0, 2, 5, 7, 9])
    assert last_positions(positions, 2) == [2, 7, 9]
    assert last_positions(positions, 5) == [9]
    assert last_positions(positions, 64) == [9]
