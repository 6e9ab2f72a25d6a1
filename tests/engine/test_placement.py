"""Placing and reading back in SGLang's own KV pool, for every dtype and mixture of layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rotary import CONTEXT, from_scratch, rope_of
from test_geometry import model_of, pool_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)
HEADS, HEAD = 2, 64
#: Two kinds of RoPE, one with the other pairing and YaRN's scale, and a layer without.
LAYERS = ("default", None, "yarn", "default")
SLOTS = torch.tensor([60, 3, 17, 41, 5])
SOURCES, TARGETS = torch.tensor([0, 9, 700, 31, 4000]), torch.tensor([4095, 9, 2, 1200, 0])
TARGET_SLOTS = torch.tensor([8, 50, 9, 33, 21])


@pytest.fixture
def ropes(sglang_cpu):
    made = {
        "default": rope_of("default"),
        "yarn": rope_of("yarn", is_neox_style=False),
        None: None,
    }
    return [made[name] for name in LAYERS]


class Pool:
    """A pool, the bare keys that its slots were rotated from, and a placer for it."""

    def __init__(self, ropes, dtype, scale=1.0):
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        from sglang_kvshare.engine.geometry import layer_geometries
        from sglang_kvshare.engine.placement import Placer

        self.pool = pool_of(dtype, head_dim=HEAD, layer_num=len(ropes))
        self.ropes, self.scale = ropes, scale
        generator = torch.Generator().manual_seed(31)
        self.bare, self.values = torch.randn(
            2, len(ropes), len(SLOTS), HEADS, HEAD, generator=generator
        )
        for number in range(len(ropes)):
            keys = self.rotated(number, SOURCES)
            layer = SimpleNamespace(layer_id=number)
            self.pool.set_kv_buffer(
                layer, KVWriteLoc(SLOTS, None), keys, self.values[number].clone(), scale, scale
            )
        self.placer = Placer(self.pool, layer_geometries(model_of(*ropes), CONTEXT))

    def rotated(self, number, positions):
        rope = self.ropes[number]
        bare = self.bare[number].clone()
        return bare if rope is None else from_scratch(rope, positions, bare)

    def place(self):
        from sglang_kvshare.attention.layerwise_copy import Moves

        return self.placer.place(Moves(SLOTS, TARGET_SLOTS, SOURCES, TARGETS)).finite()

    def keys(self, number, slots):
        return self.pool.get_key_buffer(number)[slots]

    def stored(self):
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        return [buffer.clone() for buffer in buffers]


def loss(dtype):
    """Of the stored key and of the moved one: each half a unit in the last place, of numbers
    up to the length of their pair."""
    return 1e-5 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_is_moved_by_its_own_rotation(ropes, dtype):
    pool = Pool(ropes, dtype)
    before = pool.stored()
    assert pool.place() is True
    for number, rope in enumerate(ropes):
        expected = pool.rotated(number, TARGETS)
        placed = pool.keys(number, TARGET_SLOTS)
        assert placed.dtype == dtype
        error = (placed.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < loss(dtype), number
        if rope is None:
            # No RoPE, no rotation: the very bits.
            donors = pool.keys(number, SLOTS).view(torch.uint8)
            assert torch.equal(placed.view(torch.uint8), donors)
        else:
            # The control: the donors' keys are others.
            assert (pool.keys(number, SLOTS).float() - expected).abs().max() > 0.5
    # Values are copied bit for bit, and nothing else in the pool has changed.
    for number, (old, new) in enumerate(zip(before, pool.stored(), strict=True)):
        rest = torch.ones(len(old), dtype=torch.bool)
        rest[TARGET_SLOTS] = False
        assert torch.equal(old[rest], new[rest])
        if number >= len(ropes):
            assert torch.equal(new[TARGET_SLOTS], old[SLOTS])


@pytest.mark.parametrize("dtype", FP8)
def test_the_scale_of_an_fp8_pool_needs_no_attention(ropes, dtype):
    """What is stored is the value over the scale; a rotation of one is a rotation of the other."""
    pool = Pool(ropes, dtype, scale=0.125)
    assert pool.place() is True
    for number in range(len(ropes)):
        expected = pool.rotated(number, TARGETS)
        placed = pool.keys(number, TARGET_SLOTS).float() * pool.scale
        error = (placed - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < loss(dtype)


@pytest.mark.parametrize("where", ["k_buffer", "v_buffer"])
@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found_wherever_it_is(ropes, dtype, layer, where):
    faults = [float("nan"), float("inf"), -float("inf")]
    if dtype == torch.float8_e4m3fn:
        faults = faults[:1]  # It has no infinity.
    for fault in faults:
        pool = Pool(ropes, dtype)
        buffer = getattr(pool.pool, where)[layer].view(dtype)
        buffer[SLOTS[3], 1, -1] = fault
        assert not torch.isfinite(buffer[SLOTS[3], 1, -1].float())
        assert pool.place() is False
        assert pool.placer.invalid(SLOTS).tolist() == [int(SLOTS[3])]
        # The control: as much beside the donors is nobody's business.
        clean = Pool(ropes, dtype)
        getattr(clean.pool, where)[layer].view(dtype)[1, 1, -1] = fault
        assert clean.place() is True
        assert clean.placer.invalid(SLOTS).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(ropes, dtype):
    """And stay so: a pair of them has a dimension that is larger after a rotation."""
    pool = Pool(ropes, dtype)
    limit = torch.finfo(dtype).max
    for buffer in (*pool.pool.k_buffer, *pool.pool.v_buffer):
        # FP8 saturates; for the others it is not about the range.
        buffer.view(dtype)[SLOTS] = limit if dtype in FP8 else limit / 2
    assert pool.place() is True
    for number in range(len(ropes)):
        assert torch.isfinite(pool.keys(number, TARGET_SLOTS).float()).all()


def test_fp16_that_would_overflow_is_not_called_finite(ropes):
    pool = Pool(ropes, torch.float16)
    pool.pool.k_buffer[0][SLOTS] = torch.finfo(torch.float16).max
    assert pool.place() is False


def test_nothing_to_place_is_fine(ropes):
    from sglang_kvshare.attention.layerwise_copy import Moves
    from sglang_kvshare.engine.placement import Placer

    pool = Pool(ropes, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    assert pool.placer.place(Moves(none, none, none, none)).finite()
    before = pool.stored()
    assert Placer(pool.pool, []).place(Moves(SLOTS, TARGET_SLOTS, SOURCES, TARGETS)).finite()
    assert all(torch.equal(a, b) for a, b in zip(before, pool.stored(), strict=True))


# --- the narrowed attention over such a pool ------------------------------------------------------


class StockBackend:
    """As much of an attention backend as is used; the class name says how FP8 is scaled."""

    def __init__(self, pool, tokens):
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.arange(1, tokens + 1, dtype=torch.int32).unsqueeze(0)
        )


class TorchNativeAttnBackend(StockBackend):
    pass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [StockBackend, TorchNativeAttnBackend])
def test_narrowed_attention_stores_and_reads_as_the_stock_backend_does(dtype, backend):
    from sglang_kvshare.attention.position_mask import attend
    from sglang_kvshare.engine.kept_rows import KeptRows
    from sglang_kvshare.engine.narrowing import NarrowedAttention

    tokens, rows = 20, torch.tensor([2, 7, 19])
    pool = pool_of(dtype, head_dim=HEAD)
    generator = torch.Generator().manual_seed(12)
    cached = torch.randn(2, tokens, HEADS, HEAD, generator=generator)
    q, k, v = torch.randn(3, len(rows), HEADS, HEAD, generator=generator)
    # Only an FP8 pool is scaled, and not by `torch_native`.
    fp8 = dtype in FP8
    k_scale, v_scale = (0.25, 2.0) if fp8 and backend is StockBackend else (1.0, 1.0)
    pool.k_buffer[0].view(dtype)[1 : tokens + 1] = (cached[0] / k_scale).to(dtype)
    pool.v_buffer[0].view(dtype)[1 : tokens + 1] = (cached[1] / v_scale).to(dtype)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=HEADS,
        tp_v_head_num=HEADS,
        qk_head_dim=HEAD,
        v_head_dim=HEAD,
        scaling=HEAD**-0.5,
        k_scale=torch.nn.Parameter(torch.tensor(0.25), requires_grad=False),
        v_scale=torch.nn.Parameter(torch.tensor(2.0), requires_grad=False),
    )
    kept = KeptRows(
        rows=rows.numpy(),
        row_positions=rows.numpy(),
        cache_loc=rows + 1,
        counts=[3],
        kv_lengths=[tokens],
    )
    program = SimpleNamespace(current=kept, kv_lengths=[tokens], looks=lambda layer: False)
    indices = torch.tensor([0])
    batch = SimpleNamespace(
        out_cache_loc=rows + 1, req_pool_indices=indices, req_pool_indices_cpu=indices
    )
    out = NarrowedAttention(backend(pool, tokens), program).forward(
        q.reshape(len(rows), -1), k.clone(), v.clone(), layer, batch
    )

    def read(buffer, fresh, scale):
        values = buffer.clone()
        values[rows] = fresh
        return (values / scale).to(dtype).float() * scale

    expected = attend(
        q,
        read(cached[0], k, k_scale),
        read(cached[1], v, v_scale),
        rows,
        scale=layer.scaling,
    )
    torch.testing.assert_close(out, expected.reshape(len(rows), -1), atol=1e-6, rtol=0)
