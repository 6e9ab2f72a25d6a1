"""What the tasks have in common: reproducible orders, and documents as they stand in prompts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvshare_eval.errors import EvalError

T = TypeVar("T")


def rng(seed: int, *names: object) -> random.Random:
    """A generator of its own for each use, so that no draw depends on what was drawn before."""
    return random.Random("/".join(str(part) for part in (seed, *names)))


def shuffled(items: Iterable[T], random_: random.Random) -> list[T]:
    """A shuffled copy."""
    copy = list(items)
    random_.shuffle(copy)
    return copy


def reordered(items: Sequence[T], random_: random.Random) -> list[T]:
    """Another order of at least two items, which begins with another one than ``items`` does.

    What the new order shares with the old one as an exact prefix ends before the first item.
    """
    first = random_.randrange(1, len(items))
    rest = [item for index, item in enumerate(items) if index != first]
    return [items[first], *shuffled(rest, random_)]


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Runs of exactly ``size`` items; what is left at the end is dropped."""
    iterator = iter(items)
    while len(chunk := list(islice(iterator, size))) == size:
        yield chunk


def document(title: str, text: str, *, kind: str = "Document") -> str:
    """A document as it stands in every prompt of its group, the blank line behind it included.

    What comes before a document ends in a blank line too: its tokens are the same wherever it
    stands.
    """
    return f"{kind}: {title}\n{text}\n\n" if title else f"{kind}:\n{text}\n\n"


def at_least(task: str, option: str, value: int, lowest: int) -> None:
    """Refuse an option that is too low."""
    if value < lowest:
        raise EvalError(f"option {option} of task {task}: {value}, but at least {lowest} is needed")
