"""A cache's worth of realistic sequences, and prompts that share a given part with them.

Tokens follow Zipf's law. Requests of a few tenants (namespaces) consist of their tenant's system
prompt and passages out of a library, some of them much more popular than others, at any offset and
in any order, between text of their own. A radix tree would store the system prompt once; so does
this cache, which evicts the oldest sequence when the pool is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.plan import Int64Array

VOCABULARY = 50_000
TENANTS = (b"tenant-a", b"tenant-b", b"tenant-c")
TENANT_SHARES = (0.6, 0.3, 0.1)
SYSTEM_TOKENS = 300
PASSAGE_TOKENS = (100, 400)
SEQUENCE_TOKENS = (400, 3000)


class Texts:
    """Token ids; one seed, one text.

    Args:
        passages: size of the library.
    """

    def __init__(self, seed: int, passages: int) -> None:
        self._random = np.random.default_rng(seed)
        self._zipf = 1 / np.arange(1, VOCABULARY + 1)
        self._zipf = np.cumsum(self._zipf / self._zipf.sum())
        self._passages = [self.fresh(int(n)) for n in self._between(PASSAGE_TOKENS, passages)]
        popularity = 1 / np.arange(1, passages + 1) ** 0.8
        self._popularity = np.cumsum(popularity / popularity.sum())
        self.system = {tenant: self.fresh(SYSTEM_TOKENS) for tenant in TENANTS}

    def fresh(self, tokens: int) -> Int64Array:
        """Text that nobody has written before."""
        drawn = np.searchsorted(self._zipf, self._random.random(tokens))
        return np.minimum(drawn, VOCABULARY - 1).astype(np.int64)

    def mixed(self, tokens: int, shared: float) -> Int64Array:
        """``tokens`` tokens of which about the part ``shared`` is passages of the library."""
        parts: list[Int64Array] = []
        length = 0
        while length < tokens:
            at = np.searchsorted(self._popularity, self._random.random())
            passage = self._passages[min(int(at), len(self._passages) - 1)]
            own = round(passage.shape[0] * (1 - shared) / shared) if shared else tokens
            piece = np.concatenate([self.fresh(own), passage]) if shared else self.fresh(own)
            parts.append(piece)
            length += piece.shape[0]
        return np.concatenate(parts)[:tokens]

    def tenant(self) -> bytes:
        return TENANTS[int(self._random.choice(len(TENANTS), p=TENANT_SHARES))]

    def _between(self, bounds: tuple[int, int], count: int) -> Int64Array:
        return self._random.integers(*bounds, size=count)

    def sequences(self) -> Iterator[tuple[bytes, Int64Array]]:
        """Tenant and tokens behind its system prompt, for ever."""
        while True:
            [tokens] = self._between(SEQUENCE_TOKENS, 1)
            yield self.tenant(), self.mixed(int(tokens), 0.6)


@dataclass
class Upkeep:
    """What it took to follow the tree, in seconds, and how much happened."""

    tokens: int = 0
    inserts_s: list[float] = field(default_factory=list)
    splits_s: list[float] = field(default_factory=list)
    removes_s: list[float] = field(default_factory=list)

    @property
    def us_per_token(self) -> float:
        """Microseconds a token that comes, is split off and goes again."""
        return sum(self.inserts_s + self.splits_s + self.removes_s) * 1e6 / max(1, self.tokens)

    @property
    def worst_ms(self) -> dict[str, float]:
        each = {"insert": self.inserts_s, "split": self.splits_s, "remove": self.removes_s}
        return {what: max(times, default=0.0) * 1e3 for what, times in each.items()}


class Cache:
    """A pool, a run index over it, and the order in which sequences came.

    Args:
        pool: KV slots.
        texts: where sequences come from.
    """

    def __init__(self, pool: int, texts: Texts, min_run_tokens: int = 16) -> None:
        self.index = RunIndex(pool, min_run_tokens)
        self.upkeep = Upkeep()
        self._random = np.random.default_rng(1)
        # A pool that has served for long hands slots out in no order.
        self._free = deque(self._random.permutation(pool).tolist())
        self._sequences = texts.sequences()
        self._nodes: deque[list[Int64Array]] = deque()
        self._count = 0
        self._parents: dict[bytes, int] = {}
        for tenant, tokens in texts.system.items():
            slots = self._slots(tokens.shape[0])
            self.index.insert(self._number(), tenant, tokens, slots, -1)
            self._parents[tenant] = int(slots[-1])

    def fill(self, tokens: int) -> None:
        """Insert sequences until ``tokens`` are indexed."""
        while self.index.live_tokens < tokens:
            self._insert(tokens - self.index.live_tokens)

    def churn(self, tokens: int) -> None:
        """Evict and insert, the oldest first, ``tokens`` tokens of it, at one level of filling."""
        self.upkeep = Upkeep()
        level = self.index.live_tokens
        while self.upkeep.tokens < tokens:
            self._evict()
            while self.index.live_tokens < level:
                self._insert(level - self.index.live_tokens)

    def _insert(self, most: int) -> None:
        tenant, tokens = next(self._sequences)
        tokens = tokens[:most]
        slots = self._slots(tokens.shape[0])
        number = self._number()
        begin = time.perf_counter()
        self.index.insert(number, tenant, tokens, slots, self._parents[tenant])
        self.upkeep.inserts_s.append(time.perf_counter() - begin)
        self.upkeep.tokens += tokens.shape[0]
        # Every other sequence is split later by one that shares its beginning.
        cut = tokens.shape[0] // 3
        parts = [slots]
        if number % 2 and cut:
            parts = [slots[:cut], slots[cut:]]
            upper = self._number()
            begin = time.perf_counter()
            self.index.reassign(upper, slots[:cut])
            self.upkeep.splits_s.append(time.perf_counter() - begin)
        self._nodes.append(parts)

    def _evict(self) -> None:
        for slots in reversed(self._nodes.popleft()):
            begin = time.perf_counter()
            self.index.remove(slots)
            self.upkeep.removes_s.append(time.perf_counter() - begin)
            self._free.extend(slots.tolist())

    def _slots(self, count: int) -> Int64Array:
        return np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)

    def _number(self) -> int:
        self._count += 1
        return self._count
