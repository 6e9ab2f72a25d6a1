"""Attention of scattered rows: equal to the plain formula, and causal.

Causality of a whole forward follows from this file and ``test_exactness``: there the server equals
a reference in which a row sees keys up to its own position and nothing else. (Key and value rows of
a running server cannot be read, and prompt log-probabilities switch reuse off.)
"""

from __future__ import annotations

import pytest
import torch

from sglang_kvshare.attention.position_mask import attend, last_positions

pytestmark = pytest.mark.engine


def tensors(seed, rows, tokens, heads, kv_heads, dim, value_dim=None):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    positions = torch.randperm(tokens, generator=generator)[:rows].sort().values
    query = normal(rows, heads, dim)
    return query, normal(tokens, kv_heads, dim), normal(tokens, kv_heads, value_dim or dim), positions


def plain(query, key, value, positions, scale):
    out = []
    group = query.shape[1] // key.shape[1]
    for row, position in enumerate(positions.tolist()):
        seen = position + 1
        heads = []
        for head in range(query.shape[1]):
            scores = key[:seen, head // group] @ query[row, head] * scale
            heads.append(scores.softmax(0) @ value[:seen, head // group])
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("block_rows", [1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, None), (6, 2, None), (4, 1, 8)])
def test_equals_the_plain_formula(block_rows, heads, kv_heads, value_dim):
    for seed, (rows, tokens) in enumerate([(1, 1), (1, 90), (17, 90), (90, 90), (130, 300)]):
        given = tensors(seed, rows, tokens, heads, kv_heads, 16, value_dim)
        torch.testing.assert_close(
            attend(*given, scale=0.3, block_rows=block_rows), plain(*given, 0.3),
            atol=1e-5, rtol=0,
        )


def test_a_row_sees_nothing_behind_its_position():
    query, key, value, positions = tensors(9, 100, 300, 4, 2, 16)
    before = attend(query, key, value, positions, scale=0.3)
    for row in (0, 1, 40, 63, 64, 98):
        at = int(positions[row])
        other_key, other_value = key.clone(), value.clone()
        other_key[at + 1 :] = 1e4
        other_value[at + 1 :] = float("nan")
        other_query = query.clone()
        other_query[row + 1 :] = -7.0
        after = attend(other_query, other_key, other_value, positions, scale=0.3)
        finite = before[: row + 1]
        # Rows that share a block with later ones read masked values: zero weight, whatever they are.
        if not torch.isnan(after[: row + 1]).any():
            torch.testing.assert_close(after[: row + 1], finite, atol=1e-6, rtol=0)
        other_value[at + 1 :] = 1e4
        after = attend(other_query, other_key, other_value, positions, scale=0.3)
        torch.testing.assert_close(after[: row + 1], finite, atol=1e-6, rtol=0)


def test_a_row_does_see_its_own_position():
    query, key, value, positions = tensors(10, 30, 80, 2, 2, 16)
    before = attend(query, key, value, positions, scale=0.3)
    for row in (0, 12, 29):
        other = value.clone()
        other[int(positions[row])] += 10
        after = attend(query, key, other, positions, scale=0.3)
        assert not torch.allclose(after[row], before[row], atol=1e-3)


def test_last_positions_of_blocks():
    positions = torch.tensor([0, 3, 4, 8, 9, 20, 21])
    assert last_positions(positions, 3) == [4, 20, 21]
    assert last_positions(positions, 7) == [21]
    assert last_positions(positions, 64) == [21]
