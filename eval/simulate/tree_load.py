"""Requests that compete for a cache: shuffled passages, their follow-ups, and chats.

    passages   | system | header | passage | ... | question |             any order, by Zipf's law
    follow-up  | an earlier prompt of these and its answer | question |
    chat       | system | message | answer | message | ...                 an exact prefix each time

What is asked does not depend on what is cached: one seed is one load for every cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.plan import Int64Array

VOCABULARY = 50_000
SYSTEM_TOKENS = 120
PASSAGE_TOKENS = (100, 301)
PASSAGES = (4, 7)
QUESTION_TOKENS = (12, 41)
MESSAGE_TOKENS = (40, 161)
ANSWER_TOKENS = (40, 121)
#: Turns after which a chat gives way to a new one.
CHAT_TURNS = 8
#: Exponent of the popularity of a tenant's passages, and of its sets of passages.
ZIPF = 0.9
TENANT_SHARES = (0.5, 0.3, 0.2)
#: A follow-up extends one of so many earlier prompts, a younger one more likely.
_REMEMBERED = 64


@dataclass(frozen=True)
class Asked:
    """One request. ``kind``: ``passages``, ``follow-up`` or ``chat``."""

    kind: str
    tenant: int
    prompt: Int64Array
    answer: Int64Array


@dataclass(frozen=True)
class Shape:
    """What is asked.

    Attributes:
        working_tokens: of all passages; and of all open chats, at half their turns.
        chats: share of the requests that are turns of chats.
        chats_from: part of the load from which on all requests are chats' turns.
        follow_ups: share of the others that extend an earlier prompt.
        header_tokens: text of its own, of one length, between system prompt and passages.
        sets: so many sets of passages, in an order of their own, are all that is asked for; 0: each
            prompt draws its passages and their order.
    """

    working_tokens: int
    chats: float = 0.0
    chats_from: float = 1.0
    follow_ups: float = 0.2
    header_tokens: int = 0
    sets: int = 0


class Load:
    """Requests of a shape; one seed, one load."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._random = np.random.default_rng(seed)
        self._systems = [self._text(SYSTEM_TOKENS) for _ in TENANT_SHARES]
        mean_tokens = (PASSAGE_TOKENS[0] + PASSAGE_TOKENS[1] - 1) / 2
        #: Of each tenant, the most popular passage first.
        self.libraries = [
            [
                self._text(self._between(PASSAGE_TOKENS))
                for _ in range(max(PASSAGES[1], round(share * shape.working_tokens / mean_tokens)))
            ]
            for share in TENANT_SHARES
        ]
        self._sets = [
            [self._drawn(tenant) for _ in range(shape.sets)] for tenant in range(len(TENANT_SHARES))
        ]
        turn = (sum(MESSAGE_TOKENS) + sum(ANSWER_TOKENS)) / 2 - 1
        count = max(1, round(shape.working_tokens / (SYSTEM_TOKENS + turn * CHAT_TURNS / 2)))
        #: Tenant, turns and text of each open chat.
        self._open = [self._chat(int(self._random.integers(CHAT_TURNS))) for _ in range(count)]
        self._earlier: deque[tuple[int, Int64Array]] = deque(maxlen=_REMEMBERED)

    def requests(self, count: int) -> Iterator[Asked]:
        """``count`` requests, in the order in which they come."""
        for number in range(count):
            chats = number >= self._shape.chats_from * count
            if chats or self._random.random() < self._shape.chats:
                yield self._turn()
            elif self._earlier and self._random.random() < self._shape.follow_ups:
                yield self._follow_up()
            else:
                yield self._passages()

    def _passages(self) -> Asked:
        tenant = self._tenant()
        if self._shape.sets:
            numbers = self._sets[tenant][self._popular(self._shape.sets)]
        else:
            numbers = self._drawn(tenant)
        parts = [self._systems[tenant], self._text(self._shape.header_tokens)]
        parts += [self.libraries[tenant][number] for number in numbers]
        return self._asked("passages", tenant, parts)

    def _follow_up(self) -> Asked:
        age = min(int(self._random.geometric(0.1)), len(self._earlier))
        tenant, before = self._earlier[-age]
        return self._asked("follow-up", tenant, [before])

    def _asked(self, kind: str, tenant: int, parts: list[Int64Array]) -> Asked:
        prompt = np.concatenate([*parts, self._text(self._between(QUESTION_TOKENS))])
        answer = self._text(self._between(ANSWER_TOKENS))
        self._earlier.append((tenant, np.concatenate([prompt, answer])))
        return Asked(kind, tenant, prompt, answer)

    def _turn(self) -> Asked:
        number = int(self._random.integers(len(self._open)))
        tenant, turns, before = self._open[number]
        prompt = np.concatenate([before, self._text(self._between(MESSAGE_TOKENS))])
        answer = self._text(self._between(ANSWER_TOKENS))
        after = np.concatenate([prompt, answer])
        over = turns + 1 == CHAT_TURNS
        self._open[number] = self._chat(0) if over else (tenant, turns + 1, after)
        return Asked("chat", tenant, prompt, answer)

    def _chat(self, turns: int) -> tuple[int, int, Int64Array]:
        tenant = self._tenant()
        said = [
            self._text(self._between(MESSAGE_TOKENS) + self._between(ANSWER_TOKENS))
            for _ in range(turns)
        ]
        return tenant, turns, np.concatenate([self._systems[tenant], *said])

    def _drawn(self, tenant: int) -> list[int]:
        """Numbers of different passages, in any order."""
        numbers: dict[int, None] = {}
        wanted = self._between(PASSAGES)
        while len(numbers) < wanted:
            numbers[self._popular(len(self.libraries[tenant]))] = None
        return list(numbers)

    def _popular(self, count: int) -> int:
        """One of ``count``, by Zipf's law."""
        weights = np.cumsum(np.arange(1, count + 1) ** -ZIPF)
        return int(weights.searchsorted(self._random.random() * weights[-1]))

    def _tenant(self) -> int:
        return int(self._random.choice(len(TENANT_SHARES), p=TENANT_SHARES))

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self._random.integers(*bounds))

    def _text(self, tokens: int) -> Int64Array:
        """Text that nobody has written before."""
        return self._random.integers(0, VOCABULARY, tokens, dtype=np.int64)
