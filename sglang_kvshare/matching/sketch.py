"""What a stretch of a prompt is about, as one vector: a sketch of each of its windows.

    tokens    |---- block ----|---- block ----|---- block ----|-- rest --|
    windows   |=========== window 0 ==========|
                              |=========== window 1 ==========|
                                                  |====== window 2 =====|

A sketch is the mean of the model's own input embeddings of the window's tokens, each weighted by
how rare it is among the windows seen so far, and of unit length (Arora et al., "A simple but
tough-to-beat baseline for sentence embeddings", ICLR 2017). What all texts have in common is taken
out of the embeddings first, their mean and a few directions (Mu and Viswanath, "All-but-the-Top",
ICLR 2018); without that everything is like everything else. No second model, no text. Every value
depends on the tokens that were seen and their order alone, so that the ranks of a tensor-parallel
group sketch alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_kvshare.plan import BoolArray, Int64Array

Float32Array = npt.NDArray[np.float32]

_SEED = 2503_16525
#: Directions that are taken out (docs/evaluation.md, `kvshare_eval.matching.sketches`).
_COMMON_DIRECTIONS = 8
#: Byte-pair vocabularies are numbered by falling frequency; so many ids count as the most frequent.
_HEAD_IDS = 50
#: Counts are halved when so many windows were seen, so that they follow a change of subject.
_MOST_WINDOWS = 1 << 20
#: Below this length a weighted mean is rounding noise: the window says nothing.
_LEAST_LENGTH = 1e-6
#: An embedding of which no more is left is rounding noise too.
_LEAST_SHARE = 1e-5


@dataclass(frozen=True)
class Windows:
    """Where the windows of ``n`` tokens lie: int64 ``[w]``, window ``i`` is ``[start, end)``."""

    start: Int64Array
    end: Int64Array

    def __len__(self) -> int:
        return int(self.start.shape[0])

    def only(self, wanted: BoolArray) -> Windows:
        """Those for which ``wanted``, bool ``[w]``, is true."""
        return Windows(self.start[wanted], self.end[wanted])


def windows_of(tokens: int, size: int) -> Windows:
    """Windows of ``size`` tokens every ``size // 2``, the last one ending at the end.

    Fewer than ``size`` tokens are one window of their own; none are none.
    """
    step = size // 2
    if tokens <= size:
        ends = np.array([tokens] if tokens else [], dtype=np.int64)
        return Windows(np.zeros_like(ends), ends)
    starts = np.arange(0, tokens - size + 1, step, dtype=np.int64)
    if starts[-1] + size < tokens:
        starts = np.append(starts, tokens - size)
    return Windows(starts, starts + size)


class TokenRarity:
    """In how many windows each token was seen: the weights of a sketch (inverse document
    frequency, a window being a document).

    A trust domain has one of its own: what others send must not change what is found in it. It
    keeps 12 bytes for each token id that was seen.
    """

    def __init__(self) -> None:
        self._ids: Int64Array = np.zeros(0, dtype=np.int64)
        self._seen: Float32Array = np.zeros(0, dtype=np.float32)
        self._windows = 0

    @property
    def windows(self) -> int:
        return self._windows

    @property
    def nbytes(self) -> int:
        return int(self._ids.nbytes + self._seen.nbytes)

    def observe(self, tokens: Int64Array, windows: Windows) -> None:
        """Count what ``windows`` of ``tokens`` hold, each token once a window."""
        if not len(windows):
            return
        lengths = windows.end - windows.start
        of_window = np.repeat(np.arange(len(windows)), lengths)
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # Sorting is several times faster than hashing here; both parts fit into 32 bits.
        pairs = of_window << 32 | tokens[np.repeat(windows.start, lengths) + within]
        pairs.sort()
        seen = pairs[_changes(pairs)] & 0xFFFFFFFF
        seen.sort()
        first = np.flatnonzero(_changes(seen))
        ids, counts = seen[first], np.diff(first, append=seen.shape[0]).astype(np.float32)
        at = np.searchsorted(self._ids, ids)
        known = np.zeros(ids.shape[0], dtype=np.bool_)
        inside = at < self._ids.shape[0]
        known[inside] = self._ids[at[inside]] == ids[inside]
        self._seen[at[known]] += counts[known]
        if not known.all():
            self._ids = np.insert(self._ids, at[~known], ids[~known])
            self._seen = np.insert(self._seen, at[~known], counts[~known])
        self._windows += len(windows)
        if self._windows > _MOST_WINDOWS:
            self._seen *= 0.5
            self._windows //= 2

    def weights(self, tokens: Int64Array) -> Float32Array:
        """Of each token, above 0: ``log((1 + windows) / (1 + seen)) + 1`` of what was seen."""
        seen = np.zeros(tokens.shape[0], dtype=np.float32)
        if self._ids.shape[0]:
            at = np.minimum(np.searchsorted(self._ids, tokens), self._ids.shape[0] - 1)
            seen = np.where(self._ids[at] == tokens, self._seen[at], seen)
        weights: Float32Array = np.log(np.float32(1 + self._windows) / (1 + seen)) + np.float32(1)
        return weights


class WindowSketcher(Protocol):
    """What turns tokens into sketches: :class:`Sketcher`, or another that keeps to the same.

    Attributes:
        size_tokens: length of a window, at least 2.
        dims: of a sketch.
        min_similarity: cosine from which on two windows are rather alike than not, where nobody
            says otherwise (eval/README.md).
    """

    size_tokens: int
    dims: int
    min_similarity: float

    @property
    def nbytes(self) -> int:
        """Bytes of what sketches are made from."""

    def sketch(
        self, tokens: Int64Array, rarity: TokenRarity, wanted: Windows | None = None
    ) -> tuple[Windows, Float32Array]:
        """Windows of ``tokens`` and their sketches, fp32 ``[w, dims]`` of unit length.

        A window that says nothing is left out. Changes nothing, and answers alike on every rank
        that is asked the same.

        Args:
            tokens: int ``[n]``.
            rarity: how rare tokens are where the sketches are used.
            wanted: the windows to sketch; all of :func:`windows_of` if it is not given.
        """


class Sketcher:
    """Turns tokens into sketches by the model's input embeddings.

    Args:
        embeddings: fp32 ``[vocabulary, dim]``, the model's input embeddings. They are projected to
            ``dims`` dimensions, and only these are kept; what was multiplied by
            :func:`projection` before stays as it is.
        size_tokens: length of a window, at least 2.
    """

    min_similarity = 0.6

    def __init__(self, embeddings: Float32Array, *, size_tokens: int = 64, dims: int = 128) -> None:
        if size_tokens < 2:
            raise ValueError(f"size_tokens={size_tokens}: the least is 2")
        self.size_tokens = size_tokens
        self.dims = min(dims, embeddings.shape[1])
        self._table = _without_the_common(_projected(embeddings, self.dims))

    @property
    def nbytes(self) -> int:
        return int(self._table.nbytes)

    def sketch(
        self, tokens: Int64Array, rarity: TokenRarity, wanted: Windows | None = None
    ) -> tuple[Windows, Float32Array]:
        """See :meth:`WindowSketcher.sketch`; tokens are weighted by ``rarity``.

        A window says nothing if its embeddings cancel out.
        """
        windows = windows_of(tokens.shape[0], self.size_tokens) if wanted is None else wanted
        if not len(windows):
            return windows, np.zeros((0, self.dims), dtype=np.float32)
        overlap = (windows.start[1:] < windows.end[:-1]).any()
        size = int(windows.end[0] - windows.start[0])
        if overlap or (windows.end - windows.start != size).any():
            sums = self._of_overlapping(tokens, rarity, windows)
        else:
            ids = tokens[windows.start[:, None] + np.arange(size)]
            weights = rarity.weights(ids.ravel()).reshape(-1, 1, size)
            sums = (weights @ self._table[ids])[:, 0]
        return of_unit_length(windows, sums)

    def _of_overlapping(
        self, tokens: Int64Array, rarity: TokenRarity, windows: Windows
    ) -> Float32Array:
        """fp32 ``[w, dims]``; windows that share a stretch share its sum."""
        cuts = np.unique(np.concatenate([windows.start, windows.end]))
        tokens = tokens[: cuts[-1]]
        weighted = self._table[tokens] * rarity.weights(tokens)[:, None]
        blocks = np.add.reduceat(weighted, cuts[:-1], axis=0)
        first, last = np.searchsorted(cuts, windows.start), np.searchsorted(cuts, windows.end)
        sums = blocks[first]
        for further in range(1, int((last - first).max())):
            more = first + further < last
            sums[more] += blocks[first[more] + further]
        told: Float32Array = sums
        return told


def _changes(values: Int64Array) -> BoolArray:
    """bool ``[n]``: where a sorted array has a value for the first time."""
    told = np.ones(values.shape[0], dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=told[1:])
    return told


def of_unit_length(windows: Windows, vectors: Float32Array) -> tuple[Windows, Float32Array]:
    """``vectors``, fp32 ``[w, dims]``, each divided by its length; windows of none are left out."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    telling = lengths[:, 0] > _LEAST_LENGTH
    return windows.only(telling), vectors[telling] / lengths[telling]


def projection(dim: int, dims: int) -> Float32Array:
    """fp32 ``[dim, dims]``: random directions at right angles, always the same ones."""
    random = np.random.default_rng(_SEED).standard_normal((dim, dims))
    directions, _ = np.linalg.qr(random)
    return np.ascontiguousarray(directions, dtype=np.float32)


def _projected(embeddings: Float32Array, dims: int) -> Float32Array:
    if dims == embeddings.shape[1]:
        return np.asarray(embeddings, dtype=np.float32)
    return embeddings @ projection(embeddings.shape[1], dims)


def _without_the_common(table: Float32Array) -> Float32Array:
    """Less their mean and their main directions, each token by its frequency, and of unit length.

    No text was seen yet: a token's frequency is guessed from its id by Zipf's law.
    """
    weights = 1 / (np.arange(table.shape[0], dtype=np.float32) + _HEAD_IDS)
    weights = (weights / weights.sum())[:, None]
    centred = table - (weights * table).sum(0)
    _, directions = np.linalg.eigh((centred * weights).T @ centred)
    common = directions[:, -min(_COMMON_DIRECTIONS, table.shape[1] // 4) :]
    rest = centred - (centred @ common) @ common.T
    lengths = np.linalg.norm(rest, axis=1, keepdims=True)
    telling = lengths > _LEAST_SHARE * np.linalg.norm(table, axis=1, keepdims=True)
    made: Float32Array = np.where(telling, rest / np.maximum(lengths, _LEAST_LENGTH), 0)
    return np.ascontiguousarray(made, dtype=np.float32)
