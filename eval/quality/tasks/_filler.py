"""Sentences that say nothing of interest, each of them different: a haystack."""

from __future__ import annotations

import random

from kvshare_eval.loaders.text import word_count

_WHO = (
    "baker miller sailor teacher gardener painter tailor doctor farmer clerk driver singer printer "
    "carpenter librarian postman butcher potter weaver mason"
)
_FROM = (
    "Ashford Brackley Corwen Dunster Elmham Fowey Grantham Hawick Ilkley Jedburgh Kelso Ludlow "
    "Morpeth Newbury Oakham Penrith Ripon Selby Thirsk Whitby"
)
_DID = (
    "repaired carried counted painted sold borrowed washed found measured wrapped forgot weighed "
    "polished drew lifted mended moved sorted"
)
_WHAT = (
    "lanterns baskets blankets chairs kettles barrels candles ladders bottles saddles curtains "
    "buckets carpets mirrors boxes hammers umbrellas drums"
)
_WHERE = (
    "near the old mill",
    "behind the station",
    "at the market",
    "beside the river",
    "in a narrow lane",
    "under the bridge",
    "outside the town hall",
    "on the way to the harbour",
    "in front of the church",
    "at the edge of the wood",
)
_WHEN = (
    "before breakfast",
    "on a rainy Tuesday",
    "late in autumn",
    "after the concert",
    "during the holidays",
    "shortly before noon",
    "on the first warm day",
    "while it was snowing",
)
_NUMBERS = "two three four five six seven eight nine ten eleven"
_SENTENCE_WORDS = 14
_WORDS = tuple(part.split() for part in (_WHO, _FROM, _DID, _NUMBERS, _WHAT))


def filler(words: int, random_: random.Random) -> list[str]:
    """Sentences of about ``words`` words together, at least one."""
    sentences: list[str] = []
    while sum(map(word_count, sentences)) < words - _SENTENCE_WORDS / 2:
        parts = (*_WORDS, _WHERE, _WHEN)
        who, place, did, number, what, where, when = (random_.choice(part) for part in parts)
        sentences.append(f"The {who} from {place} {did} {number} {what} {where} {when}.")
    return sentences


def blocks(statements: list[list[str]], words: int, random_: random.Random) -> list[str]:
    """A haystack in blocks, with the statements of each list at random places of a block.

    Args:
        statements: one list a block.
        words: of filler, in all blocks together.
        random_: decides filler and places.
    """
    whole: list[str] = []
    for inside in statements:
        sentences = filler(words // len(statements), random_)
        for statement in inside:
            sentences.insert(random_.randint(0, len(sentences)), statement)
        whole.append(" ".join(sentences))
    return whole
