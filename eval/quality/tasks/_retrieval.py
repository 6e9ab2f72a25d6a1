"""Retrieval by word overlap."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[a-z0-9]+")
_STOP = (
    "a an and are as at be by can do does for from have how i if in is it me my of on or that the "
    "this to was what when where which why will with you your"
)


class TfIdf:
    """Texts that are found by the words they share with a query, rare words counting most."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_terms(text)) for text in texts]
        holding = Counter(term for count in counts for term in count)
        self._idf = {term: math.log(1 + len(texts) / n) for term, n in holding.items()}
        self._vectors = [self._vector(count) for count in counts]

    def best(self, query: str, count: int) -> list[int]:
        """Indices of the ``count`` nearest texts by cosine, of equal ones the earlier first."""
        asked = self._vector(Counter(_terms(query)))
        scores = [
            sum(weight * vector.get(term, 0.0) for term, weight in asked.items())
            for vector in self._vectors
        ]
        return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]

    def _vector(self, count: Counter[str]) -> dict[str, float]:
        weights = {
            term: (1 + math.log(n)) * self._idf[term]
            for term, n in count.items()
            if term in self._idf
        }
        norm = math.sqrt(sum(weight * weight for weight in weights.values())) or 1.0
        return {term: weight / norm for term, weight in weights.items()}


def _terms(text: str) -> list[str]:
    """Words in lower case, without a plural ``s`` and without those that say nothing."""
    stop = frozenset(_STOP.split())
    words = _WORD.findall(text.lower())
    return [w[:-1] if len(w) > 3 and w.endswith("s") else w for w in words if w not in stop]
