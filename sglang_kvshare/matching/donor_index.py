"""Similar windows: FAISS over the sketches of each namespace.

    windows of a namespace
    up to 4,096    exact: every sketch is compared with a query
    more           cells: a sketch lies by the nearest of some centres; the cells nearest to a query
                   are compared

A namespace that outgrows its index gets a larger one, a few sketches at a time, with every change
that it sees, beside the one that answers meanwhile: no change waits for all of it but to list the
windows and draw the centres, no thread is needed, and ranks
that see the same changes in the same order hold the same index at every step. Centres are sketches
drawn with a fixed seed; they are not trained, for a training is a pause.

FAISS runs in the caller's thread alone. Its OpenMP may be torch's, and then
``faiss.omp_set_num_threads`` takes the model's threads away: it is set back after each call.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from sglang_kvshare.matching.sketch import Float32Array
from sglang_kvshare.plan import Int64Array

#: Up to so many windows of a namespace all are compared.
EXACT_WINDOWS = 4096
#: Cells that are compared with a query.
_PROBED_CELLS = 16
_LEAST_CELLS, _MOST_CELLS = 64, 4096
#: An index of cells is good for so many times the windows that it was made for, or 1 in so many.
_GROWTH = 4
#: A new index grows by so many sketches for each one that is added or removed meanwhile.
_MOVED = 8
_SEED = 2503_13773
#: More than was asked for, so that equal ones at the end are told apart by number.
_SPARE = 8
_DECIMALS = 5
NONE = -1


@dataclass(frozen=True)
class Similar:
    """The windows nearest to each query, best first, equal ones (to 5 decimals) by number.

    Attributes:
        windows: int64 ``[q, k]``, their numbers; -1 where there is none.
        similarity: fp32 ``[q, k]``, cosine; -inf where there is none.
    """

    windows: Int64Array
    similarity: Float32Array


#: Of a window's number as Python's integer.
_NUMBER_BYTES = 32


class DonorIndex:
    """Sketches of every namespace, searchable by similarity.

    Not thread-safe; one scheduler owns it. Nothing changes on a search.

    Args:
        dims: of a sketch.
        exact_windows: see :data:`EXACT_WINDOWS`.
    """

    def __init__(self, dims: int, exact_windows: int = EXACT_WINDOWS) -> None:
        self.dims = dims
        self._exact_windows = exact_windows
        self._partitions: dict[bytes, _Partition] = {}
        self._namespace_of: dict[int, bytes] = {}

    @property
    def windows(self) -> int:
        return len(self._namespace_of)

    @property
    def namespaces(self) -> int:
        return len(self._partitions)

    @property
    def sketch_bytes(self) -> int:
        """Bytes of the sketches and their numbers, those of an index in the making included."""
        rows = sum(part.rows for part in self._partitions.values())
        return rows * (self.dims * 4 + 8)

    @property
    def nbytes(self) -> int:
        """The same and the maps of windows, which do not shrink when windows leave."""
        maps = sum(sys.getsizeof(part.living) for part in self._partitions.values())
        maps += sys.getsizeof(self._namespace_of) + self.windows * _NUMBER_BYTES
        return self.sketch_bytes + maps

    def add(self, namespace: bytes, windows: Int64Array, sketches: Float32Array) -> None:
        """Add windows by number.

        Args:
            windows: int64 ``[w]``, numbers of at least 0 that the index does not hold.
            sketches: fp32 ``[w, dims]``, of unit length.

        Raises:
            ValueError: another shape, or a number that is there already.
        """
        if sketches.shape != (windows.shape[0], self.dims):
            raise ValueError(
                f"sketches of shape {sketches.shape}, expected {(windows.shape[0], self.dims)}"
            )
        numbers = windows.tolist()
        if len(set(numbers)) < len(numbers) or not self._namespace_of.keys().isdisjoint(numbers):
            raise ValueError("a window would be in the donor index twice")
        if not numbers:
            return
        if namespace not in self._partitions:
            self._partitions[namespace] = _Partition(self.dims, self._exact_windows)
        with _one_thread():
            self._partitions[namespace].add(windows, _rows(sketches))
        self._namespace_of.update(dict.fromkeys(numbers, namespace))

    def remove(self, windows: Int64Array) -> list[bytes]:
        """Forget windows; numbers that the index does not hold are passed over.

        Returns:
            the namespaces that have none any more.
        """
        emptied: list[bytes] = []
        gone: dict[bytes, list[int]] = {}
        for number in windows.tolist():
            namespace = self._namespace_of.pop(number, None)
            if namespace is not None:
                gone.setdefault(namespace, []).append(number)
        for namespace, numbers in gone.items():
            part = self._partitions[namespace]
            if len(numbers) == len(part.living):
                del self._partitions[namespace]
                emptied.append(namespace)
            else:
                with _one_thread():
                    part.remove(numbers)
        return emptied

    def drop(self, namespace: bytes) -> Int64Array:
        """Forget a namespace; int64, the numbers of its windows."""
        part = self._partitions.pop(namespace, None)
        numbers = [] if part is None else list(part.living)
        for number in numbers:
            del self._namespace_of[number]
        return np.array(numbers, dtype=np.int64)

    def numbers(self, namespace: bytes) -> Int64Array:
        """int64: the windows of a namespace, in the order of their coming."""
        part = self._partitions.get(namespace)
        return np.array([] if part is None else list(part.living), dtype=np.int64)

    def clear(self) -> None:
        self._partitions.clear()
        self._namespace_of.clear()

    def search(self, namespace: bytes, sketches: Float32Array, count: int) -> Similar:
        """The ``count`` most similar windows of each of ``sketches``, fp32 ``[q, dims]``."""
        part, queries = self._partitions.get(namespace), sketches.shape[0]
        windows = np.full((queries, count), NONE, dtype=np.int64)
        similarity = np.full((queries, count), -np.inf, dtype=np.float32)
        if part is None or not queries:
            return Similar(windows, similarity)
        with _one_thread():
            near, found = part.search(_rows(sketches), count + _SPARE)
        near[found == NONE] = -np.inf
        near = np.round(near, _DECIMALS)
        order = np.lexsort((found, -near), axis=1)[:, :count]
        windows[:, : order.shape[1]] = np.take_along_axis(found, order, axis=1)
        similarity[:, : order.shape[1]] = np.take_along_axis(near, order, axis=1)
        return Similar(windows, similarity)


class _Partition:
    """The windows of one namespace.

    Attributes:
        living: their numbers, in the order of their coming.
    """

    def __init__(self, dims: int, exact_windows: int) -> None:
        self.living: dict[int, None] = {}
        self._dims = dims
        self._exact_windows = exact_windows
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dims))
        #: Windows that the index was made for; 0 for an exact one.
        self._made_for = 0
        #: The index in the making, and the numbers that it still lacks.
        self._next: Any = None
        self._waiting: deque[int] = deque()

    @property
    def rows(self) -> int:
        """Sketches that are kept."""
        return int(self._index.ntotal) + (0 if self._next is None else int(self._next.ntotal))

    def add(self, windows: Int64Array, sketches: Float32Array) -> None:
        self._index.add_with_ids(sketches, windows)
        if self._next is not None:
            self._next.add_with_ids(sketches, windows)
        self.living.update(dict.fromkeys(windows.tolist()))
        self._renew(windows.shape[0])

    def remove(self, windows: list[int]) -> None:
        for window in windows:
            del self.living[window]
        gone = np.array(windows, dtype=np.int64)
        for index in filter(None, (self._index, self._next)):
            index.remove_ids(faiss.IDSelectorArray(gone.shape[0], faiss.swig_ptr(gone)))
        self._renew(len(windows))

    def search(self, sketches: Float32Array, count: int) -> tuple[Float32Array, Int64Array]:
        near, found = self._index.search(sketches, count)
        return near, found

    def _renew(self, changes: int) -> None:
        """Begin a new index when this one does not fit any more, or go on with it."""
        if self._next is None:
            if not self._outgrown():
                return
            self._begin()
        moved = 0
        while self._waiting and moved < _MOVED * changes:
            window = self._waiting.popleft()
            if window in self.living:
                self._next.add_with_ids(
                    self._index.reconstruct(window)[None], np.array([window], dtype=np.int64)
                )
                moved += 1
        if not self._waiting:
            self._index, self._next = self._next, None

    def _outgrown(self) -> bool:
        if not self._made_for:
            return len(self.living) > self._exact_windows
        return not self._made_for / _GROWTH < len(self.living) < self._made_for * _GROWTH

    def _begin(self) -> None:
        numbers = list(self.living)
        count = len(numbers)
        self._waiting = deque(numbers)
        if count <= self._exact_windows:
            self._next, self._made_for = faiss.IndexIDMap2(faiss.IndexFlatIP(self._dims)), 0
            return
        cells = min(max(int(4 * count**0.5), _LEAST_CELLS), _MOST_CELLS)
        drawn = np.random.default_rng(_SEED).choice(count, size=cells, replace=False)
        centres = faiss.IndexFlatIP(self._dims)
        centres.add(np.stack([self._index.reconstruct(numbers[row]) for row in drawn.tolist()]))
        made = faiss.IndexIVFFlat(centres, self._dims, cells, faiss.METRIC_INNER_PRODUCT)
        made.is_trained, made.nprobe = True, min(_PROBED_CELLS, cells)
        made.set_direct_map_type(faiss.DirectMap.Hashtable)  # type: ignore[attr-defined]
        self._next, self._made_for = made, count


def _rows(sketches: Float32Array) -> Float32Array:
    return np.ascontiguousarray(sketches, dtype=np.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
