"""Prompts that share a passage, for any server: of text, or of token ids alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kvshare.verify.client import Client, VerifyError, request_body

#: Ids asked for; fewer than any model has, more than chance can repeat in a run.
PROBE_IDS = 64
_FIRST = ("Nor", "Sud", "Hal", "Brin", "Cas", "Mar", "Ost", "Wel", "Tor", "Kel")
_SECOND = ("wick", "haven", "mouth", "stad")
_GOODS = ("timber", "salt", "wool", "grain", "copper", "herring", "coal", "paper")


@dataclass(frozen=True)
class Prompts:
    """Token ids; ``passage_tokens`` of ``prompt`` stand in ``donor`` at another offset."""

    donor: tuple[int, ...]
    prompt: tuple[int, ...]
    passage_tokens: int
    #: ``text``, or ``token ids`` from a server without a tokenizer.
    made_of: str


def make_prompts(
    client: Client, passage_tokens: int, rng: random.Random, *, tokenizer: bool = True
) -> Prompts:
    """Two prompts with one passage, from the server's own tokenizer where it has one.

    Args:
        tokenizer: the server says that it has one. One that has not is not asked to use it: it
            would answer with an error, and write a traceback into its log.
    """
    parts, made_of = _text_parts(client, passage_tokens, rng) if tokenizer else None, "text"
    if parts is None:
        parts, made_of = _id_parts(client, passage_tokens, rng), "token ids"
    intro, other_intro, passage, question, other_question = parts
    return Prompts(
        donor=(*intro, *passage, *question),
        prompt=(*other_intro, *passage, *other_question),
        passage_tokens=len(passage),
        made_of=made_of,
    )


def _text_parts(
    client: Client, passage_tokens: int, rng: random.Random
) -> list[Sequence[int]] | None:
    # A fact is longer than 8 tokens in any vocabulary.
    harbours = [
        f"{rng.choice(_FIRST)}{rng.choice(_SECOND)} {number}"
        for number in range(1, passage_tokens // 8 + 2)
    ]
    facts = [
        f" The harbour of {harbour} was opened in {rng.randrange(1700, 1990)}, has "
        f"{rng.randrange(12, 99)} berths and ships mostly {rng.choice(_GOODS)}."
        for harbour in harbours
    ]
    texts = [
        f"Notes of {rng.randrange(10**6)} on harbours.\n",
        f"Read the notes and answer. They were written by hand in {rng.randrange(1900, 2000)}, "
        f"for the office of trade number {rng.randrange(10**6)}, and are complete.\n",
        "".join(facts),
        "\nHow many harbours are there?",
        f"\nQuestion: what does the harbour of {harbours[0]} mostly ship?\nAnswer:",
    ]
    try:
        found = client.post("/tokenize", {"prompt": texts, "add_special_tokens": False})["tokens"]
    except (VerifyError, KeyError, TypeError):
        return None
    return [*found[:2], found[2][:passage_tokens], *found[3:]]


def _id_parts(client: Client, passage_tokens: int, rng: random.Random) -> list[Sequence[int]]:
    """Random ids that the server itself named as possible, and so within its vocabulary."""
    probe = client.generate(request_body([1], top=PROBE_IDS, answer_tokens=1))
    ids = sorted(set(probe.top[0]))
    return [rng.choices(ids, k=count) for count in (20, 45, passage_tokens, 8, 12)]
