"""A cache's worth of realistic sequences, and prompts that share a given part with them.

Tokens follow Zipf's law. Requests of a few tenants (namespaces) consist of their tenant's system
prompt and passages out of its library, at any offset and in any order, between text of their own.
The library grows with the cache, so that a passage has some four copies at any size; a few hot
ones have as many as their share brings. A radix tree would store a system prompt once; so does
this cache, which evicts the oldest sequence when it is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex
from sglang_kvshare.plan import Int64Array

VOCABULARY = 50_000
TENANTS = {b"tenant-a": 0.6, b"tenant-b": 0.3, b"tenant-c": 0.1}
SYSTEM_TOKENS = 300
PASSAGE_TOKENS = (100, 400)
SEQUENCE_TOKENS = (400, 3000)
#: Part of a cached sequence that is passages; part of the passages that are hot ones.
PASSAGE_SHARE, HOT_SHARE = 0.6, 0.2
COPIES, HOT_PASSAGES = 4, 20
STRETCH_SLOTS = 16


class Texts:
    """Token ids; one seed, one text.

    Args:
        cached_tokens: tokens that will be in the cache, for the size of the libraries.
    """

    def __init__(self, seed: int, cached_tokens: int) -> None:
        self.random = np.random.default_rng(seed)
        weights = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
        self._zipf = weights / weights[-1]
        self.system = {tenant: self.fresh(SYSTEM_TOKENS) for tenant in TENANTS}
        drawn = cached_tokens * PASSAGE_SHARE / np.mean(PASSAGE_TOKENS) / COPIES
        self._libraries = {
            tenant: [
                self.fresh(self.between(PASSAGE_TOKENS))
                for _ in range(HOT_PASSAGES + round(drawn * share))
            ]
            for tenant, share in TENANTS.items()
        }

    def between(self, bounds: tuple[int, int]) -> int:
        return int(self.random.integers(*bounds))

    def tenant(self) -> bytes:
        return list(TENANTS)[int(self.random.choice(len(TENANTS), p=list(TENANTS.values())))]

    def fresh(self, tokens: int) -> Int64Array:
        """Text that nobody has written before."""
        ranks = np.searchsorted(self._zipf, self.random.random(tokens))
        return np.minimum(ranks, VOCABULARY - 1).astype(np.int64)

    def sequence(self, tenant: bytes) -> Int64Array:
        """What follows the system prompt: passages between text of its own."""
        library, parts, length = self._libraries[tenant], [], 0
        tokens = self.between(SEQUENCE_TOKENS)
        while length < tokens:
            hot = self.random.random() < HOT_SHARE
            passage = library[self.between((0, HOT_PASSAGES if hot else len(library)))]
            own = round(passage.shape[0] * (1 - PASSAGE_SHARE) / PASSAGE_SHARE)
            parts += self.fresh(own), passage
            length += own + passage.shape[0]
        return np.concatenate(parts)[:tokens]


@dataclass
class Upkeep:
    """What it took to follow the tree, in seconds of each change."""

    tokens: int = 0
    inserts_s: list[float] = field(default_factory=list)
    splits_s: list[float] = field(default_factory=list)
    removes_s: list[float] = field(default_factory=list)
    #: Of similar donors, coming and going.
    sketches_s: list[float] = field(default_factory=list)

    @property
    def sketches_us_per_token(self) -> float:
        return sum(self.sketches_s) * 1e6 / max(1, self.tokens)

    @property
    def us_per_token(self) -> float:
        """Microseconds for a token that comes, is split off and goes again."""
        return sum(self.inserts_s + self.splits_s + self.removes_s) * 1e6 / max(1, self.tokens)

    @property
    def worst_ms(self) -> dict[str, float]:
        each = {"insert": self.inserts_s, "split": self.splits_s, "remove": self.removes_s}
        return {what: max(times, default=0.0) * 1e3 for what, times in each.items()}


@dataclass(frozen=True)
class _Cached:
    tenant: bytes
    tokens: Int64Array
    #: Slots of the nodes that hold it, from the root on.
    nodes: list[Int64Array]


class Cache:
    """A run index, and the pool and tree that it would follow.

    Args:
        tokens: that the cache will hold; the pool is 5 % larger.
        similar: makes the index of similar donors over the run index, which then follows it.
    """

    def __init__(
        self,
        tokens: int,
        *,
        seed: int = 0,
        min_run_tokens: int = 16,
        similar: Callable[[RunIndex], SemanticIndex] | None = None,
    ) -> None:
        self._texts = Texts(seed, tokens)
        self.random = self._texts.random
        self.tokens = tokens
        self.pool = tokens + max(tokens // 20, SEQUENCE_TOKENS[1])
        self.index = RunIndex(self.pool, min_run_tokens)
        self.similar = None if similar is None else similar(self.index)
        self.upkeep = Upkeep()
        # A pool that has served for long hands slots out in short stretches that are in order.
        stretches = np.array_split(np.arange(self.pool), self.pool // STRETCH_SLOTS)
        order = self.random.permutation(len(stretches))
        self._free = deque(np.concatenate([stretches[i] for i in order]).tolist())
        self._sequences: deque[_Cached] = deque()
        self._numbers = 0
        self._parents: dict[bytes, int] = {}
        for tenant, system in self._texts.system.items():
            slots = self._take(system.shape[0])
            self.index.insert(self._number(), tenant, system, slots, -1)
            if self.similar is not None:
                self.similar.insert(tenant, system, slots)
            self._parents[tenant] = int(slots[-1])

    def fill(self) -> None:
        """Insert sequences until the cache is full."""
        while self.index.live_tokens < self.tokens:
            self._insert()

    def churn(self, tokens: int) -> None:
        """Replace ``tokens`` tokens, the oldest first, and measure the upkeep of that alone."""
        self.upkeep = Upkeep()
        while self.upkeep.tokens < tokens:
            self._evict()
            self.fill()

    def prompt(self, tokens: int, shared: float) -> tuple[bytes, Int64Array]:
        """A tenant, and a prompt of which the part ``shared`` is cut out of cached sequences."""
        tenant, parts = self.parts(tokens, shared)
        return tenant, np.concatenate([part for _, part in parts])[:tokens]

    def parts(self, tokens: int, shared: float) -> tuple[bytes, list[tuple[bool, Int64Array]]]:
        """A tenant, and the parts of a prompt: whether each is shared, and its tokens."""
        tenant = self._texts.tenant()
        cached = self.cached(tenant)
        parts: list[tuple[bool, Int64Array]] = []
        length = 0
        while length < tokens:
            size = self._texts.between(PASSAGE_TOKENS)
            own = round(size * (1 - shared) / shared) if shared and cached else size
            parts.append((False, self._texts.fresh(own)))
            if shared and cached:
                source = cached[self._texts.between((0, len(cached)))]
                begin = self._texts.between((0, max(1, source.shape[0] - size)))
                parts.append((True, source[begin : begin + size]))
            length += sum(part.shape[0] for _, part in parts[-2:])
        return tenant, parts

    def cached(self, tenant: bytes) -> list[Int64Array]:
        """Tokens of the tenant's sequences, the oldest first."""
        return [one.tokens for one in self._sequences if one.tenant == tenant]

    def _insert(self) -> None:
        tenant = self._texts.tenant()
        tokens = self._texts.sequence(tenant)[: self.tokens - self.index.live_tokens]
        slots, number = self._take(tokens.shape[0]), self._number()
        begin = time.perf_counter()
        self.index.insert(number, tenant, tokens, slots, self._parents[tenant])
        self.upkeep.inserts_s.append(time.perf_counter() - begin)
        if self.similar is not None:
            begin = time.perf_counter()
            self.similar.insert(tenant, tokens, slots)
            self.upkeep.sketches_s.append(time.perf_counter() - begin)
        self.upkeep.tokens += tokens.shape[0]
        cut = tokens.shape[0] // 3
        nodes = [slots]
        # Every other sequence is split by one that shares its beginning.
        if number % 2 and cut:
            nodes, upper = [slots[:cut], slots[cut:]], self._number()
            begin = time.perf_counter()
            self.index.reassign(upper, slots[:cut])
            self.upkeep.splits_s.append(time.perf_counter() - begin)
        self._sequences.append(_Cached(tenant, tokens, nodes))

    def _evict(self) -> None:
        for slots in reversed(self._sequences.popleft().nodes):
            if self.similar is not None:
                begin = time.perf_counter()
                self.similar.remove(slots)
                self.upkeep.sketches_s.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            self.index.remove(slots)
            self.upkeep.removes_s.append(time.perf_counter() - begin)
            self._free.extend(slots.tolist())

    def _take(self, count: int) -> Int64Array:
        return np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
