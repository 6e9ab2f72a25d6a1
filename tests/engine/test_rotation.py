"""Keys moved by KVShare against keys that SGLang's own RotaryEmbedding rotates from scratch."""

from __future__ import annotations

import pytest
import torch
from tiny_models import LINEAR_SCALING, LLAMA3_SCALING, YARN_SCALING

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

HEAD, MAX = 64, 4096
KINDS = {
    "default": {},
    "long_base": {"base": 1_000_000},
    "linear": {"rope_scaling": LINEAR_SCALING},
    "llama3": {"rope_scaling": LLAMA3_SCALING},
    "partial": {"partial_rotary_factor": 0.5},
    "partial_quarter": {"partial_rotary_factor": 0.25},
    "partial_llama3": {"partial_rotary_factor": 0.5, "rope_scaling": LLAMA3_SCALING},
}


def rope_of(dtype=torch.float32, **settings):
    from sglang.srt.layers.rotary_embedding import get_rope

    settings = {"base": 10_000, **settings}
    return get_rope(HEAD, HEAD, MAX, dtype=dtype, **settings)


def from_scratch(rope, positions, keys):
    """SGLang's forward on un-rotated ``keys`` ``[n, heads, head_dim]``."""
    count = keys.shape[0]
    query = torch.zeros_like(keys)
    _, rotated = rope.forward_native(
        positions, query.reshape(count, -1).clone(), keys.reshape(count, -1).clone()
    )
    return rotated.view_as(keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_moved_key_equals_one_rotated_from_scratch(kind, heads):
    from sglang_kvshare.engine.placement import fp32_table
    from sglang_kvshare.engine.support import check_rope
    from sglang_kvshare.recompute.rope import move_keys, plan_move

    rope = rope_of(**KINDS[kind])
    check_rope(rope)
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(300, heads, HEAD, generator=generator)
    source, target = torch.randint(0, MAX, (2, 300), generator=generator)
    target[:20] = source[:20]
    donor = from_scratch(rope, source, keys)
    kept = donor.clone()
    moved = move_keys(donor, plan_move(fp32_table(rope), source, target))
    torch.testing.assert_close(moved, from_scratch(rope, target, keys), atol=1e-5, rtol=0)
    # The donor's stored value stays as it is.
    assert torch.equal(donor, kept)
    # Positive control: the positions matter.
    assert (moved - donor).abs().max() > 0.5


def test_a_move_there_and_back_by_two_copies_is_what_one_move_gives():
    """Not how it is used (every copy is from the donor's stored value), but rotations compose."""
    from sglang_kvshare.engine.placement import fp32_table
    from sglang_kvshare.recompute.rope import move_keys, plan_move

    rope = rope_of()
    table = fp32_table(rope)
    keys = torch.randn(50, 2, HEAD, generator=torch.Generator().manual_seed(6))
    a, b = torch.arange(50), torch.arange(50).flip(0) + 500
    there = move_keys(keys, plan_move(table, a, b))
    torch.testing.assert_close(move_keys(there, plan_move(table, b, a)), keys, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_moved_in_fp32_and_rounded_once(dtype):
    from sglang_kvshare.engine.placement import fp32_table
    from sglang_kvshare.recompute.rope import move_keys, plan_move

    exact = rope_of()
    rope = rope_of(dtype=dtype)
    keys = torch.randn(200, 2, HEAD, generator=torch.Generator().manual_seed(7))
    source = torch.arange(200)
    target = source.flip(0) * 7
    stored = from_scratch(exact, source, keys).to(dtype)
    table = fp32_table(rope)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, fp32_table(exact), atol=1e-6, rtol=0)
    moved = move_keys(stored, plan_move(table, source, target))
    assert moved.dtype == dtype
    # What is left is the rounding of the stored value and that of the result.
    error = (moved.float() - from_scratch(exact, target, keys)).abs().max()
    assert error < 2.5 * torch.finfo(dtype).eps * keys.abs().max()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_scaling": YARN_SCALING}, "YaRN"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTK"),
        ({"is_neox_style": False}, "GPT-J"),
    ],
)
def test_every_other_kind_is_refused_by_name(settings, name):
    from sglang_kvshare.engine.support import Unsupported, check_rope

    with pytest.raises(Unsupported, match=name) as refusal:
        check_rope(rope_of(**settings))
    assert "\n" not in str(refusal.value)


def test_every_rotary_class_of_sglang_is_either_served_or_refused():
    """No class slips through by inheriting from one that is served."""
    import importlib
    import pkgutil

    from sglang.srt.layers import rotary_embedding
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from sglang_kvshare.engine.support import SUPPORTED_ROPE, Unsupported, check_rope

    for module in pkgutil.iter_modules(rotary_embedding.__path__, rotary_embedding.__name__ + "."):
        importlib.import_module(module.name)
    classes, stack = set(), [RotaryEmbedding]
    while stack:
        kind = stack.pop()
        classes.add(kind)
        stack += kind.__subclasses__()
    assert len(classes) > 5
    for kind in classes:
        rope = kind.__new__(kind)
        torch.nn.Module.__init__(rope)
        rope.is_neox_style = True
        if kind.__name__ in SUPPORTED_ROPE:
            check_rope(rope)
        else:
            with pytest.raises(Unsupported, match=kind.__name__):
                check_rope(rope)
