"""Similar donors: cached windows that are like a prompt's, and the tokens that both share.

    prompt   ...|------- window -------|...
                        ~                         sketches: cosine at least the gate
    donor    ...|--before--|--- window ---|--after--|...
                  == x ====== xx === x ===        aligned: most of the window, in long enough blocks

Runs of equal tokens that the run index cannot see, because an edit cuts them short, are found here.
A donor's window is known by the slot of its last token. A path loses its tokens from the end, so
that a window is whole for as long as that slot is in the index; where a quota took its beginning,
what is left of it is aligned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.matching.alignment import align
from sglang_kvshare.matching.donor_index import NONE, DonorIndex
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.sketch import TokenRarity, Windows, WindowSketcher, windows_of
from sglang_kvshare.matching.surroundings import Stretch
from sglang_kvshare.plan import BoolArray, Int64Array, Span

#: A window of which so much is covered already is not asked for.
_COVERED = 0.5

#: A window of which so much is covered once a donor was aligned with it is shown no other.
_ANSWERED = 0.75


@dataclass(frozen=True)
class SimilaritySettings:
    """What counts as similar.

    Attributes:
        min_similarity: the gate, a cosine.
        min_coverage: share of a prompt's window that an alignment must match.
        min_run_tokens: shorter blocks are not reused.
        donors: windows looked at for each of the prompt's.
    """

    min_similarity: float = 0.6
    min_coverage: float = 0.5
    min_run_tokens: int = 4
    donors: int = 2

    @classmethod
    def of(cls, config: KVShareConfig, sketcher: WindowSketcher) -> SimilaritySettings:
        """As the configuration wants it; its gate of 0 is what suits the sketches."""
        return cls(
            min_similarity=config.min_similarity or sketcher.min_similarity,
            min_coverage=config.min_window_coverage,
            min_run_tokens=config.min_semantic_run_tokens,
            donors=config.similar_donors_per_window,
        )


class SemanticIndex:
    """Owner of the sketches of what a run index holds; told of every change after the run index.

    Args:
        runs: where the tokens are.
        sketcher: what windows are sketched with.
        settings: what is found.
    """

    def __init__(
        self,
        runs: RunIndex,
        sketcher: WindowSketcher,
        settings: SimilaritySettings = SimilaritySettings(),
    ) -> None:
        self.settings = settings
        self._runs = runs
        self._sketcher = sketcher
        self._donors = DonorIndex(sketcher.dims)
        #: Of each namespace that has a window.
        self._rarity: dict[bytes, TokenRarity] = {}
        #: Length of the window that ends in a slot; 0 for none.
        self._length = np.zeros(runs.slots, dtype=np.int16)

    @property
    def windows(self) -> int:
        return self._donors.windows

    @property
    def nbytes(self) -> int:
        """Bytes of the sketches, of what they are made from and of the map of windows."""
        made_from = self._sketcher.nbytes + sum(one.nbytes for one in self._rarity.values())
        return self._donors.nbytes + made_from + int(self._length.nbytes)

    def window_slots(self) -> Int64Array:
        """int64: the slot of the last token of every window; a walk over all of them."""
        return np.flatnonzero(self._length)

    # --- upkeep ------------------------------------------------------------------------------

    def insert(self, namespace: bytes, tokens: Int64Array, slots: Int64Array) -> None:
        """Tokens were inserted into the run index: int ``[m]`` each, neighbours on a path."""
        rarity = self._rarity.get(namespace) or TokenRarity()
        windows, sketches = self._sketcher.sketch(tokens, rarity)
        if not len(windows):
            return
        rarity.observe(tokens, windows)
        self._rarity[namespace] = rarity
        last = slots[windows.end - 1]
        self._length[last] = windows.end - windows.start
        self._donors.add(namespace, last, sketches)

    def remove(self, slots: Int64Array) -> None:
        """Tokens are leaving the run index; those that it does not hold are passed over."""
        ends = slots[self._length[slots] > 0]
        self._length[ends] = 0
        for namespace in self._donors.remove(ends):
            del self._rarity[namespace]

    def relearn(self, namespaces: Iterable[bytes]) -> None:
        """How rare tokens are in ``namespaces`` is counted anew, from what is there now.

        Looks at all of their windows.
        """
        for namespace in namespaces:
            if namespace not in self._rarity:
                continue
            rarity = self._rarity[namespace] = TokenRarity()
            found = [
                self._runs.around(slot, int(self._length[slot]) - 1, 0).tokens
                for slot in self._donors.numbers(namespace).tolist()
            ]
            ends = np.cumsum([tokens.shape[0] for tokens in found], dtype=np.int64)
            starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
            rarity.observe(np.concatenate(found).astype(np.int64), Windows(starts, ends))

    def clear(self) -> None:
        self._length.fill(0)
        self._donors.clear()
        self._rarity.clear()

    # --- lookup ------------------------------------------------------------------------------

    def find(
        self,
        tokens: Int64Array,
        namespace: bytes,
        covered: BoolArray,
        *,
        max_depth: int = 0,
    ) -> list[Span]:
        """Runs that ``tokens`` shares with similar windows. Changes nothing.

        Args:
            tokens: int ``[n]``, what the radix tree's prefix leaves of a prompt.
            covered: bool ``[n]``: served by runs already.
            max_depth: tokens of a larger depth do not serve.

        Returns:
            Spans whose positions are those of ``tokens``; those of two donors may overlap. Longest
            first, then the more similar, then by start, source and slot.
        """
        settings, rarity = self.settings, self._rarity.get(namespace)
        if rarity is None:
            return []
        every = windows_of(tokens.shape[0], self._sketcher.size_tokens)
        # Every other one, and the last: cached windows overlap, so that these meet most of theirs.
        apart = np.arange(len(every)) % 2 == 0
        apart[-1:] = True
        asked = every.only(apart & (_share(covered, every) < _COVERED))
        windows, sketches = self._sketcher.sketch(tokens, rarity, asked)
        near = self._donors.search(namespace, sketches, settings.donors)
        found: list[Span] = []
        taken, answered_to = covered.copy(), 0
        for row in range(len(windows)):
            # The last window begins in the one before it: what that one has answered is left out.
            part = slice(max(answered_to, int(windows.start[row])), int(windows.end[row]))
            seen: set[int] = set()
            for slot, likeness in zip(
                near.windows[row].tolist(), near.similarity[row].tolist(), strict=True
            ):
                if slot == NONE or likeness < settings.min_similarity:
                    break
                # Windows overlap: what the first one's surroundings hold was aligned with it.
                if slot in seen:
                    continue
                donor = self._surroundings(slot)
                seen.update(donor.slots.tolist())
                if donor.depth > max_depth:
                    continue
                spans = _shared(tokens[part], part.start, donor, likeness, settings)
                for span in spans:
                    taken[span.start : span.end] = True
                    answered_to = part.stop
                found += spans
                if spans and taken[part].mean() >= _ANSWERED:
                    break
        return sorted(found, key=_by_worth)

    def _surroundings(self, slot: int) -> Stretch:
        """A window and half as much on either side."""
        length = int(self._length[slot])
        return self._runs.around(slot, length + length // 2, length // 2)


def _share(covered: BoolArray, windows: Windows) -> np.ndarray:
    """Of each window, how much is covered."""
    counts = np.concatenate([[0], np.cumsum(covered)])
    told: np.ndarray = (counts[windows.end] - counts[windows.start]) / (windows.end - windows.start)
    return told


def _shared(
    window: Int64Array,
    start: int,
    donor: Stretch,
    similarity: float,
    settings: SimilaritySettings,
) -> list[Span]:
    blocks = align(window, donor.tokens, settings.min_run_tokens).blocks
    if sum(block.length for block in blocks) < settings.min_coverage * window.shape[0]:
        return []
    return [
        Span(
            start=start + block.start,
            source=donor.position + block.source,
            slots=donor.slots[block.source : block.source + block.length].astype(np.int64),
            kind="semantic",
            depth=donor.depth,
            similarity=similarity,
        )
        for block in blocks
    ]


def _by_worth(run: Span) -> tuple[int, float, int, int, int]:
    return -run.length, -run.similarity, run.start, run.source, int(run.slots[0])
