"""Donor values copied beside the forward that reads them, a few layers at a time.

A layer's placed keys and values are read by its attention, and its own rows are written where the
copy has been, so that layer ``l`` may run when its group is there:

    forward stream   write of donors .. |record|  embedding  |wait 0| layer 0 |wait 1| layers 1-3 ..
    copy stream                         |wait|  group 0 |record| group 1 |record| group 2 |record|

The first group is one layer, which everything waits for; the others are copied while layers before
them compute. On a CPU there is one group and nothing to wait for.

Whether all that was copied is finite is known on the host when the last group is done, and not
before. Asked behind the launch of the forward it costs no time of the device: the host waits for
the copy while the forward is queued (:meth:`Copying.finite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvshare.attention.kernels.copy_rotate import PoolLayers, copy_rotate, pool_layers
from sglang_kvshare.recompute.rope import Rotation

#: Layers with which a further group begins. Each group is a few times as long as those before it.
GROUP_BEGINS = (1, 4, 16)


@dataclass(frozen=True)
class Moves:
    """``n`` values to copy: all int64 ``[n]`` on the pool's device.

    No slot is both source and target, and no target is named twice.
    """

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    source_positions: torch.Tensor
    target_positions: torch.Tensor


class Copying:
    """A copy that is under way.

    Args:
        faults: int32 ``[1]`` on the host, not 0 when something was not finite; ``None`` when
            nothing is copied.
        groups: of each group its first layer, and what is recorded when it is there.
        done: recorded when ``faults`` is on the host; ``None`` when all is there.
        streams: see :class:`LayerwiseCopy`.
    """

    def __init__(
        self,
        faults: torch.Tensor | None = None,
        groups: Sequence[tuple[int, Any]] = (),
        done: Any = None,
        streams: Any = None,
    ) -> None:
        self._faults = faults
        self._waiting = list(groups)
        self._done = done
        self._streams = streams

    @property
    def at_once(self) -> bool:
        """Whether it was done when it was asked for, so that the host need not wait."""
        return self._done is None

    def before(self, layer: int) -> None:
        """Have the current stream wait for what layer ``layer`` reads and overwrites."""
        while self._waiting and self._waiting[0][0] <= layer:
            _, event = self._waiting.pop(0)
            self._streams.current_stream().wait_event(event)

    def wait(self) -> None:
        """Have the current stream wait for all of it."""
        if self._waiting:
            self.before(self._waiting[-1][0])

    def finite(self) -> bool:
        """Whether all that was copied is finite; the host waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._faults is None or not int(self._faults[0])


class LayerwiseCopy:
    """Copies within one pool, one copy at a time: wait for the last before the next begins.

    Args:
        keys, values, rotations: of each layer; see
            :func:`sglang_kvshare.attention.kernels.copy_rotate.pool_layers`.
        streams: ``torch.cuda``, or what stands in for it; ``None`` to copy in place, at once.

    Raises:
        ValueError: a layout that is not read.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        rotations: Sequence[Rotation | None],
        streams: Any = None,
    ) -> None:
        begins = [0, *(at for at in GROUP_BEGINS if at < len(keys))] if streams else [0]
        ends = [*begins[1:], len(keys)]
        self._groups: list[tuple[int, PoolLayers]] = [
            (begin, pool_layers(keys[begin:end], values[begin:end], rotations[begin:end]))
            for begin, end in zip(begins, ends, strict=True)
        ]
        self._streams = streams
        device = keys[0].device if keys else torch.device("cpu")
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)
        if streams is not None:
            # Made once: a stream waits for what an event had recorded when it was told to wait.
            self._stream = streams.Stream()
            self._tail, self._done = streams.Event(), streams.Event()
            self._events = [streams.Event() for _ in begins]
            self._told = torch.zeros(1, dtype=torch.int32, pin_memory=self._faults.is_cuda)

    def start(self, moves: Moves) -> Copying:
        """Copy behind what the current stream has been given until now."""
        if self._streams is None:
            self._faults.zero_()
            self._copy(self._groups[0][1], moves)
            return Copying(self._faults.clone())
        self._tail.record(self._streams.current_stream())
        self._stream.wait_event(self._tail)
        with self._streams.stream(self._stream):
            self._faults.zero_()
            for (_, layers), event in zip(self._groups, self._events, strict=True):
                self._copy(layers, moves)
                event.record(self._stream)
            self._told.copy_(self._faults, non_blocking=True)
            self._done.record(self._stream)
        for tensor in vars(moves).values():
            if tensor.is_cuda:
                # Not to be given out again while the other stream reads it.
                tensor.record_stream(self._stream)
        begins = [begin for begin, _ in self._groups]
        return Copying(
            self._told,
            list(zip(begins, self._events, strict=True)),
            self._done,
            self._streams,
        )

    def _copy(self, layers: PoolLayers, moves: Moves) -> None:
        copy_rotate(
            layers,
            moves.source_slots,
            moves.target_slots,
            moves.source_positions,
            moves.target_positions,
            self._faults,
        )
