"""A copy on a stream of its own: what waits for what, on streams that write down what is asked.

Work on a stream is done when it is enqueued here, so that values are right in any case; the order
that a device would keep is read from what was written down.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sglang_kvshare.attention import layerwise_copy
from sglang_kvshare.attention.layerwise_copy import Copying, LayerwiseCopy, Moves
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.recompute.rope import Rotation

SLOTS, HEADS, DIM = 24, 2, 8


class Streams:
    """As much of ``torch.cuda`` as is used."""

    def __init__(self, monkeypatch):
        self.log = []
        self.now = self.main = self._Stream(self, "forward")
        told = torch.zeros
        # There is nothing to pin here.
        monkeypatch.setattr(
            torch, "zeros", lambda *args, pin_memory=False, **kwargs: told(*args, **kwargs)
        )
        copied = layerwise_copy.copy_rotate

        def copying(layers, *args):
            self.log.append((self.now.name, "copy", len(layers.keys)))
            copied(layers, *args)

        monkeypatch.setattr(layerwise_copy, "copy_rotate", copying)

    class _Stream:
        def __init__(self, streams, name):
            self.streams, self.name = streams, name

        def wait_event(self, event):
            assert event.recorded, "a stream waits for an event that was not recorded"
            self.streams.log.append((self.name, "wait", event.number))

    def Stream(self):
        return self._Stream(self, "copies")

    def Event(self):
        streams = self

        class Event:
            number = 0
            recorded = False
            waited = 0

            def record(self, stream):
                self.recorded = True
                self.number = len(streams.log)
                streams.log.append((stream.name, "record", self.number))

            def synchronize(self):
                self.waited += 1
                streams.log.append(("host", "wait", self.number))

        return Event()

    def current_stream(self):
        return self.now

    @contextmanager
    def stream(self, stream):
        was, self.now = self.now, stream
        yield
        self.now = was


def rotation():
    angles = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    return Rotation(torch.cat([angles.cos(), angles.sin()], 1).float())


def buffers(layers, seed):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(layers, SLOTS, HEADS, DIM, generator=generator).unbind(0))


def moves():
    return Moves(
        torch.tensor([3, 9, 4]), torch.tensor([20, 1, 7]), torch.arange(3), torch.arange(3) + 11
    )


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 20])
def test_a_layer_waits_for_its_own_values_and_for_no_more(layers, monkeypatch):
    streams = Streams(monkeypatch)
    keys, values, turns = buffers(layers, 1), buffers(layers, 2), [rotation()] * layers
    plain = [[x.clone() for x in each] for each in (keys, values)]
    LayerwiseCopy(*plain, turns).start(moves())
    copier = LayerwiseCopy(keys, values, turns, streams)
    streams.log.clear()
    for _ in range(2):
        # Events are used again by the next copy.
        copying = copier.start(moves())
        log, streams.log[:] = list(streams.log), []
        begins = [0, *(at for at in (1, 4, 16) if at < layers)]
        sizes = np.diff([*begins, layers]).tolist()
        tail = log[0][2]
        # Behind all that the forward's stream had, the donors' own writes among it.
        assert log[:2] == [("forward", "record", tail), ("copies", "wait", tail)]
        assert [entry[2] for entry in log if entry[1] == "copy"] == sizes
        assert {entry[0] for entry in log[1:]} == {"copies"}
        events = [log[i + 1] for i, entry in enumerate(log) if entry[1] == "copy"]
        assert all(entry[1] == "record" for entry in events)
        for layer in range(layers):
            copying.before(layer)
            group = sum(begin <= layer for begin in begins)
            waited = [("forward", "wait", entry[2]) for entry in events[:group]]
            assert streams.log == waited, layer
        copying.wait()
        assert len(streams.log) == len(begins)
        assert not copying.at_once
        assert copying.finite()
        assert streams.log[-1][0] == "host"
        streams.log.clear()
    for one, other in zip(keys + values, plain[0] + plain[1], strict=True):
        assert torch.equal(one, other)


def test_who_reads_all_at_once_waits_for_all(monkeypatch):
    streams = Streams(monkeypatch)
    copier = LayerwiseCopy(buffers(20, 1), buffers(20, 2), [None] * 20, streams)
    copying = copier.start(moves())
    streams.log.clear()
    copying.wait()
    assert [entry[:2] for entry in streams.log] == [("forward", "wait")] * 4
    copying.before(19)
    assert len(streams.log) == 4


@pytest.mark.parametrize("beside", [False, True])
def test_a_fault_in_any_group_is_told_and_forgotten_by_the_next_copy(beside, monkeypatch):
    streams = Streams(monkeypatch) if beside else None
    for layer in range(6):
        keys, values = buffers(6, 1), buffers(6, 2)
        copier = LayerwiseCopy(keys, values, [None] * 6, streams)
        kept, values[layer][9, 1, 3] = float(values[layer][9, 1, 3]), float("nan")
        faulty = copier.start(moves())
        assert not faulty.finite()
        values[layer][9, 1, 3] = kept
        assert copier.start(moves()).finite()


def test_nothing_copied_is_finite_and_there():
    nothing = Copying()
    nothing.before(3)
    nothing.wait()
    assert nothing.at_once
    assert nothing.finite()


def test_indices_arrive_as_they_were():
    told = upload(torch.device("cpu"), np.array([3, 1]), [], [7], np.arange(4, dtype=np.int64))
    assert [x.tolist() for x in told] == [[3, 1], [], [7], [0, 1, 2, 3]]
    assert all(x.dtype == torch.int64 for x in told)
