"""How long the answers to similar prompts were (CacheOPT, arXiv 2503.13773, learns it in a model).

    prompt    |------- ... -------|--- its end: what is asked ---|
                                           ~
    answered  |--- ... ---|--- its end ---|  -> tokens of its answer

The end of a prompt says what is asked for, so that it alone is sketched. A namespace is told of its
own answers only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.matching.donor_index import NONE, DonorIndex
from sglang_kvshare.matching.sketch import TokenRarity, Windows, WindowSketcher
from sglang_kvshare.plan import Int64Array

#: Answers remembered, of all namespaces together; the oldest leave.
_MOST_ANSWERS = 4096
#: Prompts of this cosine or less ask for something else.
_MIN_SIMILARITY = 0.6
_NEIGHBOURS = 8


@dataclass(frozen=True)
class _Answer:
    namespace: bytes
    tokens: int
    tenant: str | None


class AnsweredPrompts:
    """Owner of the sketches of prompts that were answered; bounded.

    Args:
        sketcher: of windows of tokens.
        most: answers that are remembered.
    """

    def __init__(self, sketcher: WindowSketcher, most: int = _MOST_ANSWERS) -> None:
        self._sketcher = sketcher
        self._index = DonorIndex(sketcher.dims)
        # Equal weights: which tokens are rare is the other prompts' business.
        self._rarity = TokenRarity()
        self._most = most
        self._answers: dict[int, _Answer] = {}
        self._order: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._order)

    def neighbours(self, namespace: bytes, prompt: Int64Array) -> tuple[int, ...]:
        """Lengths of the answers to the nearest prompts of ``namespace``, nearest first.

        Args:
            prompt: int ``[n]``, token ids.
        """
        sketch = self._sketch(prompt)
        if sketch is None:
            return ()
        near = self._index.search(namespace, sketch, _NEIGHBOURS)
        return tuple(
            self._answers[number].tokens
            for number, likeness in zip(
                near.windows[0].tolist(), near.similarity[0].tolist(), strict=True
            )
            if number != NONE and likeness > _MIN_SIMILARITY
        )

    def add(
        self, namespace: bytes, prompt: Int64Array, answer_tokens: int, tenant: str | None = None
    ) -> None:
        """An answer is complete.

        Args:
            tenant: whose it is, for :meth:`forget`.
        """
        sketch = self._sketch(prompt)
        if sketch is None:
            return
        if len(self._order) == self._most:
            self._drop([self._order.popleft()])
        self._index.add(namespace, np.array([self._next], dtype=np.int64), sketch)
        self._answers[self._next] = _Answer(namespace, answer_tokens, tenant)
        self._order.append(self._next)
        self._next += 1

    def forget(self, tenant: str) -> set[bytes]:
        """Nothing of ``tenant`` is remembered any more; returns the namespaces that it was in."""
        theirs = [number for number, one in self._answers.items() if one.tenant == tenant]
        namespaces = {self._answers[number].namespace for number in theirs}
        self._drop(theirs)
        self._order = deque(number for number in self._order if number in self._answers)
        return namespaces

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._answers[number]
        self._index.remove(np.array(numbers, dtype=np.int64))

    def _sketch(self, prompt: Int64Array) -> np.ndarray | None:
        """fp32 ``[1, dims]``; ``None`` where the end says nothing."""
        end = prompt.shape[0]
        if not end:
            return None
        start = max(0, end - self._sketcher.size_tokens)
        window = Windows(np.array([start]), np.array([end]))
        kept, sketches = self._sketcher.sketch(prompt, self._rarity, window)
        return sketches if len(kept) else None
