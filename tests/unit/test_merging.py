"""Two parts of an attention merged, against the attention over all keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvshare.attention.merging import merge_parts

pytestmark = pytest.mark.unit


def attention(logits, values):
    """Output ``[rows, heads, dim]`` and base-2 logarithm of the sums ``[rows, heads]``."""
    if not logits.shape[-1]:
        # What a kernel leaves where there is no key is not defined.
        shape = (*logits.shape[:2], values.shape[-1])
        return torch.full(shape, float("nan")), torch.full(logits.shape[:2], float("-inf"))
    out = logits.softmax(-1) @ values
    return out, logits.logsumexp(-1) / torch.log(torch.tensor(2.0))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 7), st.sampled_from([1.0, 30.0]))
def test_it_equals_attention_over_all_keys(seed, cut, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, 7, generator=generator) * spread
    values = torch.randn(7, 4, generator=generator)
    whole, _ = attention(logits, values)
    parts = attention(logits[..., :cut], values[:cut]), attention(logits[..., cut:], values[cut:])
    merged = merge_parts(*parts[0], *parts[1])
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    assert merged.dtype == whole.dtype


def test_the_dtype_of_the_model_is_kept():
    out = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    lse = torch.zeros(2, 3)
    assert merge_parts(out, lse, out * 3, lse).dtype == torch.bfloat16
    assert torch.equal(merge_parts(out, lse, out * 3, lse), out * 2)
