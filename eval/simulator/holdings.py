"""What each request is, has generated, and holds of the pool.

    prompt + answer      |- path in the tree, locked -|-- private slots --|

A request that decodes grows with the batch, which only knows the step at which it joined: what is
told here of its answer and of its private slots is as it was then. The batch adds the rest when
the request leaves.
"""

from __future__ import annotations

from kvshare_eval.simulator.contents import Contents
from kvshare_eval.simulator.kv_cache import KvCache, Node
from kvshare_eval.simulator.requests import Requests

#: SGLang refuses prompts that leave less room than this.
_SPARE_TOKENS = 6


class Holdings:
    """Of all requests, by number.

    Attributes:
        prompt_tokens: of the prompt.
        output_tokens: of the whole answer, as far as the server lets it go.
        max_new_tokens: bound on it; so is this.
        out_tokens: of the answer so far, of those that are there.
        path: nodes in the tree that are locked for it, of those that are admitted.
        private_tokens: slots that it holds beside these.
    """

    def __init__(
        self, requests: Requests, contents: Contents, cache: KvCache, pool_tokens: int
    ) -> None:
        self._contents = contents
        self._cache = cache
        # `max_req_len` is one less than the pool.
        self._room_tokens = pool_tokens - 1
        self.prompt_tokens: list[int] = requests.prompt.tolist()
        self.output_tokens: list[int] = requests.output.tolist()
        self.max_new_tokens: list[int] = requests.max_new.tolist()
        self.out_tokens: dict[int, int] = {}
        self.path: dict[int, list[Node]] = {}
        self.private_tokens: dict[int, int] = {}

    def comes(self, i: int) -> bool:
        """False if it could never fit, and is refused; else its answer is bounded by the pool."""
        room, prompt = self._room_tokens, self.prompt_tokens[i]
        if prompt >= room - _SPARE_TOKENS + 1:
            return False
        self.max_new_tokens[i] = min(self.max_new_tokens[i], room - prompt - 1)
        self.output_tokens[i] = min(self.output_tokens[i], self.max_new_tokens[i])
        self.out_tokens[i] = 0
        return True

    def fill_tokens(self, i: int) -> int:
        """What must be in the cache before the next token."""
        return self.prompt_tokens[i] + self.out_tokens[i]

    def admit(self, i: int, path: list[Node]) -> None:
        """It is chosen for prefill, with this prefix, which is locked."""
        self.path[i] = path
        self.private_tokens[i] = 0

    def take(self, i: int, tokens: int) -> None:
        """Slots for what it computes now.

        Raises:
            ValueError: there are not as many.
        """
        self._cache.take(tokens)
        self.private_tokens[i] += tokens

    def publish(self, i: int, upto: int, *, approximate: bool) -> None:
        """Blocks of its prompt that are computed up to there go into the tree.

        Args:
            approximate: some of them were taken from elsewhere.
        """
        contents, size, cache = self._contents.of(i), self._contents.block_tokens_of(i), self._cache
        path, prompt = self.path[i], self.prompt_tokens[i]
        last = len(contents) if upto >= prompt else upto // size
        exact = not self._contents.elsewhere or not path or path[-1].exact
        blocks = []
        for place, content in enumerate(contents[len(path) : last], len(path)):
            if exact and approximate:
                # From the first block on that was taken from elsewhere the context is not exact.
                exact = not cache.has_donor(content)
            blocks.append((content, min(size, prompt - place * size), exact))
        if blocks:
            self.path[i], _ = cache.publish(path, blocks)
            self.private_tokens[i] -= sum(tokens for _, tokens, _ in blocks)
        if upto >= prompt:
            # A last token that was cached and computed all the same gives its second slot back.
            held = sum(node.tokens for node in self.path[i])
            spare = held + self.private_tokens[i] - self.fill_tokens(i)
            if spare > 0:
                cache.give(spare)
                self.private_tokens[i] -= spare

    def grow(self, i: int, tokens: int) -> None:
        """It decoded so many, each in a private slot, and leaves the batch."""
        self.out_tokens[i] += tokens
        self.private_tokens[i] += tokens

    def hand_over(self, i: int) -> tuple[list[Node], int]:
        """Its path, which is still locked, and its private slots; whoever asks gives them back."""
        return self.path.pop(i), self.private_tokens.pop(i)

    def end(self, i: int) -> int:
        """It has ended, and leaves what it held to the cache. Tokens of its answer."""
        path, private = self.hand_over(i)
        self._cache.leave(path, private, -2 * i - 3)
        return self.out_tokens.pop(i)
