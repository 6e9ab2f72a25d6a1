"""Prompts as blocks, looked up in the cache: the prefix, blocks elsewhere, what others could take.

    prompt     |  1  |  2  |  7  |  8  | 9 |        content numbers; the last block may be short
               |- prefix --|                        matched from the root: ``matched``
                           |-- inner ----|          each may stand elsewhere: ``elsewhere_tokens``
                                         |   |      holds the question, and is computed in any case

Nothing is remembered here: the blocks are the workload's, what is cached the pool's.
"""

from __future__ import annotations

from kvshare_eval.simulator.kv_cache import KvCache, Node
from kvshare_eval.simulator.requests import Requests

#: Blocks of a prompt that tell whether another computes the same.
_KEYS = 64


class Contents:
    """The prompts of a workload, and the cache that they are looked up in.

    Args:
        elsewhere: whether blocks are reused at any place, and not only as a prefix.
    """

    def __init__(self, requests: Requests, cache: KvCache, *, elsewhere: bool) -> None:
        self._blocks = requests.blocks
        self._prompt_tokens: list[int] = requests.prompt.tolist()
        self._cache = cache
        self.shared = bool(requests.blocks)
        self.block_tokens = requests.block_tokens
        self.elsewhere = elsewhere

    def of(self, i: int) -> tuple[int, ...]:
        # A prompt that shares nothing is one block, which only it can find when it resumes.
        return self._blocks[i] if self.shared else (-2 * i - 2,)

    def block_tokens_of(self, i: int) -> int:
        """Tokens of each of its blocks, but of the last."""
        return self.block_tokens if self.shared else self._prompt_tokens[i]

    def matched(self, i: int) -> list[Node]:
        """Nodes of its cached prefix. Changes nothing."""
        return self._cache.matched(self.of(i))

    def elsewhere_tokens(self, i: int, prefix: int, *, takes: bool = False) -> int:
        """Tokens of blocks beyond the prefix that stand elsewhere in the cache.

        Args:
            takes: they are about to be taken.
        """
        if not self.elsewhere:
            return 0
        size, cache = self.block_tokens, self._cache
        # The last block is computed in any case: it holds the question.
        inner = self._blocks[i][prefix // size : (self._prompt_tokens[i] - 1) // size]
        found = [content for content in inner if cache.has_donor(content)]
        if takes:
            for content in found:
                cache.touch_donor(content)
        return size * len(found)

    def keys(self, i: int, known: int) -> tuple[int, ...]:
        """Whole blocks behind the first ``known`` ones, which it would compute and others could
        take."""
        if not self.shared:
            return ()
        whole = self._prompt_tokens[i] // self.block_tokens
        return self._blocks[i][known : min(whole, known + _KEYS)]
