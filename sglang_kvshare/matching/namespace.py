"""The trust domain that a key belongs to, encoded so that no two domains look alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Namespace:
    """``(cache_salt, extra_key, adapter)``; ``None`` and the empty text are different things."""

    cache_salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None

    def encode(self) -> bytes:
        """Injective: each part is preceded by its length, an absent one by a mark of its own."""
        parts = (self.cache_salt, self.extra_key, self.adapter)
        return "".join(map(_part, parts)).encode("utf-8", "surrogatepass")

    def tree_key(self) -> str | None:
        """What stands in for ``extra_key`` in SGLang's radix keys; ``None`` for the common case.

        SGLang appends the adapter's id to the caller's ``extra_key`` without a separator, so that
        ("ab", "c") and ("a", "bc") would share a subtree; lengths keep them apart. The salt has a
        field of its own in the radix key.
        """
        if self.extra_key is None and self.adapter is None:
            return None
        return _part(self.extra_key) + _part(self.adapter)


def _part(text: str | None) -> str:
    return "-;" if text is None else f"{len(text)}:{text};"
