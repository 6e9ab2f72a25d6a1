"""Host memory and the copies to it: extents against an oracle, bits in every dtype."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]

SLOTS, LAYERS, HEADS, DIM = 400, 3, 2, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def memory_of(capacity, rows=(8, 24)):
    from sglang_kvshare.engine.host_memory import HostMemory

    return HostMemory(rows, capacity, pinned=False)


def small_segments(capacity, size):
    """As many segments as there are in a pool of gigabytes."""
    from sglang_kvshare.engine import host_memory

    patch = pytest.MonkeyPatch()
    patch.setattr(host_memory, "_LEAST_BYTES", size * 32)
    patch.setattr(host_memory, "_MOST_BYTES", size * 32)
    memory = memory_of(capacity)
    patch.undo()
    return memory


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 30),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40),
)
def test_what_is_taken_is_free_before_and_nobody_elses(capacity, size, steps):
    memory = small_segments(capacity, size)
    taken = []
    for take, amount in steps:
        free = capacity - sum(e.tokens for extents in taken for e in extents)
        assert memory.free_tokens == free
        if take and amount > free:
            with pytest.raises(MemoryError):
                memory.take(amount)
        elif take:
            extents = memory.take(amount)
            assert sum(extent.tokens for extent in extents) == amount
            taken.append(extents)
        elif taken:
            memory.give(taken.pop(amount % len(taken)))
        held = [
            (extent.segment, at)
            for extents in taken
            for extent in extents
            for at in range(extent.start, extent.stop)
        ]
        assert len(held) == len(set(held))
    while taken:
        memory.give(taken.pop())
    # Whole again: what fits into a segment takes one extent.
    assert len(memory.take(min(size, capacity))) == 1


def test_it_is_allocated_when_it_is_written():
    memory = small_segments(100, 40)
    assert memory.allocated_bytes == 0
    (extent,) = memory.take(10)
    keys, values = memory.planes(extent)
    assert (keys.shape, values.shape) == ((10, 8), (10, 24))
    assert memory.allocated_bytes == 20 * 32  # The last segment is the smallest that fits.
    with pytest.raises(ValueError, match="free already"):
        memory.give([extent, extent])


def pool_of(dtype):
    generator = torch.Generator().manual_seed(3)

    def buffer():
        shape = (SLOTS, HEADS, DIM * dtype.itemsize)
        # Every pattern of bits, those of NaN included.
        bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return bits.view(dtype)

    keys, values = ([buffer() for _ in range(LAYERS)] for _ in range(2))
    return SimpleNamespace(
        start_layer=0,
        layer_num=LAYERS,
        get_key_buffer=keys.__getitem__,
        get_value_buffer=values.__getitem__,
        buffers=[*keys, *values],
    )


def bits(pool, slots):
    return [buffer.view(torch.uint8)[slots].clone() for buffer in pool.buffers]


def copier_of(pool, tokens=1000):
    from sglang_kvshare.engine.host_copies import Copier

    row = sum(b[0].numel() * b.element_size() for b in pool.buffers)
    copier = Copier(pool, tokens * row)
    assert (copier.capacity_tokens, copier.bytes_per_token) == (tokens, row)
    return copier


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_bits_come_back_to_other_slots_after_the_old_ones_were_overwritten(dtype, page):
    pool = pool_of(dtype)
    copier = copier_of(pool)
    pages = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(1))
    slots = (pages[:, None] * page + torch.arange(page)).reshape(-1)
    count = max(1, 150 // page) * page
    old, new = slots[:count], slots[-count:]
    was = bits(pool, old)
    # In pieces, as when the pool is nearly full.
    first, rest = copier.memory.take(7), copier.memory.take(count - 7)
    go = threading.Event()
    copier.worker.submit(lambda job: go.wait(60))
    job = copier.out(old, first + rest)
    assert not job.wait(0.05)
    go.set()
    assert job.wait(60)
    assert job.succeeded
    assert job.ms > 0
    for buffer in pool.buffers:
        buffer.view(torch.uint8)[old] = 255
    skip = page * (count // page // 3)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[new[skip:]] = False
    untouched = bits(pool, others)
    assert copier.back(first + rest, skip, new[skip:]).done()
    for before, now in zip(was, bits(pool, new), strict=True):
        assert torch.equal(before[skip:], now[skip:])
    assert all(map(torch.equal, untouched, bits(pool, others)))


def test_a_cancelled_copy_is_done_and_did_not_succeed():
    pool = pool_of(torch.float32)
    copier = copier_of(pool)
    go = threading.Event()
    copier.worker.submit(lambda job: go.wait(60))
    extents = copier.memory.take(10)
    copier.memory.zero(extents)
    job = copier.out(torch.arange(10), extents)
    zeros = copier.zero(extents)
    job.cancel()
    assert not job.done()
    go.set()
    assert job.wait(60)
    assert not job.succeeded
    assert job.error is None
    # Behind the copy, whatever became of it.
    assert zeros.wait(60)
    assert zeros.succeeded
    assert not any(plane.any() for extent in extents for plane in copier.memory.planes(extent))


def test_what_a_copy_raises_is_kept_and_the_next_one_runs():
    pool = pool_of(torch.float32)
    copier = copier_of(pool)
    extents = copier.memory.take(10)
    job = copier.out(torch.arange(SLOTS, SLOTS + 10), extents)
    assert job.wait(60)
    assert not job.succeeded
    assert isinstance(job.error, (IndexError, RuntimeError))
    job = copier.out(torch.arange(10), extents)
    assert job.wait(60)
    assert job.succeeded


def test_bytes_that_are_no_words_are_copied_too():
    """A row of 6 bytes."""
    generator = random.Random(1)
    keys = [torch.tensor([[[generator.randrange(256)] * 6]] * 20, dtype=torch.uint8)]
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=1,
        get_key_buffer=keys.__getitem__,
        get_value_buffer=keys.__getitem__,
        buffers=keys * 2,
    )
    copier = copier_of(pool, 20)
    extents = copier.memory.take(5)
    was = bits(pool, torch.arange(5))
    assert copier.out(torch.arange(5), extents).wait(60)
    keys[0][:] = 0
    copier.back(extents, 0, torch.arange(10, 15))
    assert all(map(torch.equal, was, bits(pool, torch.arange(10, 15))))


def test_copies_leave_the_forwards_threads_alone():
    """A second team of OpenMP threads beside the forward's would slow every parallel region."""
    from sglang_kvshare.engine.host_copies import Worker

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        worker, done = Worker(), threading.Event()

        def work(job):
            torch.zeros(1 << 20).add_(1)
            seen.append(torch.get_num_threads())
            done.set()

        worker.submit(work)
        assert done.wait(30)
        assert seen == [1]
        assert torch.get_num_threads() == 2
        # A thread that nothing was done for has as many as the process.
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [1, 2]
    finally:
        torch.set_num_threads(before)
