"""Variable tracking in the style of RULER (arXiv 2404.06654), generated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from kvshare_eval.loaders import DataSource
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._filler import blocks
from kvshare_eval.quality.tasks._shared import at_least, reordered, rng, shuffled

_INSTRUCTION = (
    "Memorize the variable assignments hidden in the following text. They hold in whatever order "
    "they stand."
)
_NEUTRAL = "How many variables are assigned in the text above?"
_NAME_LETTERS = 4
_BLOCK_WORDS = 45


@register_task("variables", metric="found_share", max_new_tokens=40)
def variables(
    data: DataSource, seed: int, *, words: int = 360, chains: int = 2, hops: int = 3
) -> Groups:
    """The same assignments in blocks in another order, and another value.

    An answer is judged by the share of the variables that it names, as RULER does; RULER keeps
    assignments in the order of their chain, which blocks in another order cannot.

    Args:
        data: not used; everything is generated.
        seed: decides text, names, values and orders.
        words: of filler around the assignments.
        chains: values in a text; each is asked for once.
        hops: assignments from variable to variable behind each value.
    """
    at_least("variables", "chains", chains, 1)
    at_least("variables", "hops", hops, 1)
    at_least("variables", "words", words, 2 * _BLOCK_WORDS)
    for index in count():
        yield _group(f"{index:04d}", seed, words, chains, hops)


def _group(name: str, seed: int, words: int, chains: int, hops: int) -> Group:
    random_ = rng(seed, "variables", name)
    names = _names(random_, chains * (hops + 1))
    values = [str(value) for value in random_.sample(range(10**4, 10**5), chains)]
    members = [names[chain * (hops + 1) : (chain + 1) * (hops + 1)] for chain in range(chains)]
    statements = [
        f"VAR {variable} = {f'VAR {chain[step - 1]}' if step else value}."
        for chain, value in zip(members, values, strict=True)
        for step, variable in enumerate(chain)
    ]
    inside: list[list[str]] = [[] for _ in range(max(2, words // _BLOCK_WORDS))]
    for number, statement in enumerate(shuffled(statements, random_)):
        inside[number % len(inside)].append(statement)
    base = blocks(inside, words, random_)
    cases = tuple(
        Case(
            value,
            _prompt(reordered(base, rng(seed, "variables", name, value)), _question(value)),
            tuple(chain),
            user(_question(value)),
        )
        for value, chain in zip(values, members, strict=True)
    )
    return Group(name, (_prompt(base, _NEUTRAL),), cases)


def _names(random_: random.Random, number: int) -> list[str]:
    """Names of capital letters without vowels, which are no words and no part of one."""
    names: dict[str, None] = {}
    while len(names) < number:
        names["".join(random_.choices("BCDFGHJKLMNPQRSTVWXZ", k=_NAME_LETTERS))] = None
    return list(names)


def _question(value: str) -> str:
    return (
        f"Find all variables that are assigned the value {value} in the text above, directly or "
        "through other variables. Answer with their names only."
    )


def _prompt(text: Sequence[str], question: str) -> Prompt:
    haystack = "".join(f"{block}\n\n" for block in text)
    return user(f"{_INSTRUCTION}\n\n{haystack}{question}")
