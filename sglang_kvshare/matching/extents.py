"""The table of extents: one row for each stretch of tokens that lies in consecutive cells."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import Int32Array, Int64Array

_COLUMNS = (
    ("start", np.int32),
    ("length", np.int32),
    ("parent", np.int32),
    ("children", np.int32),
    ("position", np.int32),
    ("reach", np.int32),
    ("node", np.int64),
    ("domain", np.int32),
    ("depth", np.int32),
    ("stamp", np.int32),
)
_FIRST_ROWS = 64


class Extents:
    """Columns over extent numbers; numbers are used again.

    Attributes:
        start, length: the cells ``[start, start + length)``.
        parent: extent of the token before the first one, or -1.
        children: extents whose parent this one is.
        position: position of the first token in its sequence.
        reach: indexed tokens before the first one on its path, counted up to ``w - 1``.
        node: number of the tree node that owns the tokens.
        domain: number of the trust domain.
        depth: provenance of the tokens, 0 = exact.
        stamp: number of the insertion that brought the tokens; splits keep it.
    """

    start: Int32Array
    length: Int32Array
    parent: Int32Array
    children: Int32Array
    position: Int32Array
    reach: Int32Array
    node: Int64Array
    domain: Int32Array
    depth: Int32Array
    stamp: Int32Array

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        """Extents in use."""
        return self._rows - len(self._unused)

    @property
    def rows(self) -> int:
        """Rows that were ever used: numbers are below it."""
        return self._rows

    @property
    def nbytes(self) -> int:
        columns = sum(int(getattr(self, name).nbytes) for name, _ in _COLUMNS)
        return columns + 8 * len(self._unused)

    def clear(self) -> None:
        for name, kind in _COLUMNS:
            setattr(self, name, np.zeros(_FIRST_ROWS, dtype=kind))
        self._rows = 0
        self._unused: list[int] = []

    def new(self, count: int) -> Int64Array:
        """int64 ``[count]``: numbers of new rows, whose columns the caller sets."""
        again = self._unused[-count:]
        del self._unused[-count:]
        first, self._rows = self._rows, self._rows + count - len(again)
        while self._rows > self.start.shape[0]:
            for name, _ in _COLUMNS:
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(old.shape[0] // 2, old.dtype)]))
        return np.array([*again, *range(first, self._rows)], dtype=np.int64)

    def free(self, rows: Int64Array) -> None:
        self.length[rows] = 0
        self.parent[rows] = -1
        self._unused += rows.tolist()
