"""Who may use how much of the host memory that preempted requests are swapped to.

Accounting only: the memory itself, and the copies, belong to the engine.
"""

from __future__ import annotations


class HostPool:
    """A bounded pool, counted in tokens.

    Args:
        capacity_tokens: 0 for no swapping.

    Raises:
        ValueError: below 0.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 0:
            raise ValueError(f"capacity_tokens={capacity_tokens}: the least is 0")
        self.capacity_tokens = capacity_tokens
        self._held: dict[str, int] = {}
        self._used = 0

    def reserve(self, rid: str, tokens: int) -> bool:
        """Room for ``tokens`` of a request; false if there is none, and nothing is changed.

        Raises:
            KeyError: it has room already.
            ValueError: fewer than 1 token.
        """
        if rid in self._held:
            raise KeyError(f"request {rid!r} is in the host pool already")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: the least is 1")
        if tokens > self.free_tokens:
            return False
        self._held[rid] = tokens
        self._used += tokens
        return True

    def release(self, rid: str) -> int:
        """It was copied back or will not be; the tokens that this frees.

        Raises:
            KeyError: it has no room.
        """
        tokens = self._held.pop(rid)
        self._used -= tokens
        return tokens

    @property
    def used_tokens(self) -> int:
        return self._used

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self._used

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def __len__(self) -> int:
        return len(self._held)
