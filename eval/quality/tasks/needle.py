"""Multi-key needle in a haystack, in the style of RULER (arXiv 2404.06654), generated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._filler import blocks
from kvshare_eval.quality.tasks._shared import at_least, reordered, rng, shuffled

_INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards."
)
_NEUTRAL = "How many special magic numbers are mentioned in the provided text?"
_ADJECTIVES = "amber brave calm dusty eager faint gentle hollow icy jolly keen lively"
_NOUNS = "anchor beacon cedar dragon engine falcon glacier harbor island jungle kitten lagoon"
_KEYS = [f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
#: A needle's own words, which filler makes up for in a block without one.
_BLOCK_WORDS = 45


@register_task("needle", metric="contains", max_new_tokens=16)
def needle(data: DataSource, seed: int, *, words: int = 360, keys: int = 4) -> Groups:
    """The same haystack with its blocks in another order, and another key.

    Args:
        data: not used; everything is generated.
        seed: decides text, keys, numbers and orders.
        words: of filler around the needles.
        keys: needles in a haystack; each is asked for once.
    """
    at_least("needle", "keys", keys, 1)
    at_least("needle", "words", words, 2 * _BLOCK_WORDS)
    if keys > len(_KEYS):
        raise EvalError(f"option keys of task needle: {keys}, but at most {len(_KEYS)} are there")
    for index in count():
        yield _group(f"{index:04d}", seed, words, keys)


def _group(name: str, seed: int, words: int, keys: int) -> Group:
    random_ = rng(seed, "needle", name)
    chosen = random_.sample(_KEYS, keys)
    numbers = [str(number) for number in random_.sample(range(10**6, 10**7), keys)]
    needles = [
        f"One of the special magic numbers for {key} is: {number}."
        for key, number in zip(chosen, numbers, strict=True)
    ]
    empty: list[list[str]] = [[] for _ in range(max(2, words // _BLOCK_WORDS) - keys)]
    base = blocks(shuffled([*([needle] for needle in needles), *empty], random_), words, random_)
    cases = tuple(
        Case(
            key,
            _prompt(reordered(base, rng(seed, "needle", name, key)), _question(key)),
            (number,),
            user(_question(key)),
        )
        for key, number in zip(chosen, numbers, strict=True)
    )
    return Group(name, (_prompt(base, _NEUTRAL),), cases)


def _question(key: str) -> str:
    return (
        f"What is the special magic number for {key} mentioned in the provided text? "
        "Answer with the number only."
    )


def _prompt(text: Sequence[str], question: str) -> Prompt:
    haystack = "".join(f"{block}\n\n" for block in text)
    return user(f"{_INSTRUCTION}\n\n{haystack}{question}")
