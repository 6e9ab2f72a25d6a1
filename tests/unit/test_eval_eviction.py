"""The load of the experiment on eviction."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import typer

from kvshare_eval.simulate import eviction
from kvshare_eval.simulate.tree_driver import Served, share
from kvshare_eval.simulate.tree_load import (
    ANSWER_TOKENS,
    CHAT_TURNS,
    PASSAGES,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    TENANT_SHARES,
    Asked,
    Load,
    Shape,
)

pytestmark = pytest.mark.unit


def begins_with(prompt: np.ndarray, before: np.ndarray) -> bool:
    return len(prompt) > len(before) and bool((prompt[: len(before)] == before).all())


def passages_of(load: Load, asked: Asked, begin: int = SYSTEM_TOKENS) -> list[int]:
    """Numbers of the passages that follow ``begin``."""
    numbers = []
    while True:
        rest = asked.prompt[begin:]
        found = [n for n, p in enumerate(load.libraries[asked.tenant]) if begins_with(rest, p)]
        if not found:
            return numbers
        numbers += found
        begin += len(load.libraries[asked.tenant][found[0]])


def test_one_seed_is_one_load_and_another_seed_another():
    shape = Shape(20_000, chats=0.4)
    first, again, other = (list(Load(shape, seed).requests(40)) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert (one.kind, one.tenant) == (two.kind, two.tenant)
        assert np.array_equal(one.prompt, two.prompt)
        assert np.array_equal(one.answer, two.answer)
    assert [len(a.prompt) for a in first] != [len(a.prompt) for a in other]


def test_prompts_are_their_tenants_passages_in_changing_order_and_a_question_of_their_own():
    load = Load(Shape(20_000, follow_ups=0), seed=1)
    asked = list(load.requests(200))
    assert {one.kind for one in asked} == {"passages"}
    systems, orders, questions = {}, Counter(), set()
    for one in asked:
        system = systems.setdefault(one.tenant, one.prompt[:SYSTEM_TOKENS])
        assert np.array_equal(system, one.prompt[:SYSTEM_TOKENS])
        numbers = passages_of(load, one)
        assert PASSAGES[0] <= len(numbers) < PASSAGES[1]
        assert len(set(numbers)) == len(numbers)
        lengths = [len(load.libraries[one.tenant][n]) for n in numbers]
        question = one.prompt[SYSTEM_TOKENS + sum(lengths) :]
        assert QUESTION_TOKENS[0] <= len(question) < QUESTION_TOKENS[1]
        assert ANSWER_TOKENS[0] <= len(one.answer) < ANSWER_TOKENS[1]
        questions.add(question.tobytes())
        orders.update((one.tenant, n, place) for place, n in enumerate(numbers))
    assert len(systems) == len(TENANT_SHARES)
    assert len(questions) == len(asked)
    # The most popular passage stands at every place, and far more often than a rare one.
    assert all(orders[0, 0, place] for place in range(PASSAGES[0]))
    often = [sum(orders[0, n, place] for place in range(PASSAGES[1])) for n in (0, 30)]
    assert often[0] > 4 * often[1]


def test_the_libraries_are_the_working_set():
    for working in (20_000, 100_000):
        load = Load(Shape(working), seed=1)
        tokens = [sum(map(len, library)) for library in load.libraries]
        assert sum(tokens) == pytest.approx(working, rel=0.1)
        assert tokens == pytest.approx([working * part for part in TENANT_SHARES], rel=0.2)


def test_a_follow_up_extends_an_earlier_prompt_and_its_answer():
    asked = list(Load(Shape(20_000, follow_ups=0.5), seed=1).requests(60))
    follow_ups = [n for n, one in enumerate(asked) if one.kind == "follow-up"]
    assert 15 < len(follow_ups) < 45
    for number in follow_ups:
        one = asked[number]
        before = [np.concatenate([e.prompt, e.answer]) for e in asked[:number]]
        extended = [n for n, text in enumerate(before) if begins_with(one.prompt, text)]
        assert extended
        assert asked[extended[-1]].tenant == one.tenant
    # A control: what is not a follow-up extends nothing.
    first = asked[:1]
    new = [one for one in asked[1:] if one.kind == "passages"]
    assert not any(begins_with(one.prompt, first[0].prompt) for one in new)


def test_a_chat_goes_on_from_its_last_answer_until_it_gives_way():
    asked = list(Load(Shape(6_000, chats=1.0), seed=1).requests(120))
    assert {one.kind for one in asked} == {"chat"}
    turns: list[int] = []
    for number, one in enumerate(asked):
        before = [
            n
            for n, e in enumerate(asked[:number])
            if begins_with(one.prompt, np.concatenate([e.prompt, e.answer]))
        ]
        turns.append(turns[before[-1]] + 1 if before else 1)
    assert max(turns) == CHAT_TURNS
    assert turns.count(2) > 5
    # Nothing but prefixes comes again: no run of a prompt is in another chat's.
    ends = {one.answer.tobytes() for one in asked}
    assert len(ends) == len(asked)


def test_a_load_turns_to_chats_and_mixes_them():
    turned = [one.kind for one in Load(Shape(20_000, chats_from=0.5), seed=1).requests(80)]
    assert "chat" not in turned[:40]
    assert set(turned[40:]) == {"chat"}
    mixed = [one.kind for one in Load(Shape(20_000, chats=0.5), seed=1).requests(200)]
    assert 70 < mixed.count("chat") < 130


def test_sets_come_again_behind_headers_of_one_length():
    shape = Shape(20_000, follow_ups=0, header_tokens=24, sets=2)
    load = Load(shape, seed=1)
    asked = list(load.requests(80))
    begin = SYSTEM_TOKENS + 24
    sets = {(one.tenant, *passages_of(load, one, begin)) for one in asked}
    assert len(sets) == 2 * len(TENANT_SHARES)
    headers = {one.prompt[SYSTEM_TOKENS:begin].tobytes() for one in asked}
    assert len(headers) == len(asked)


def served(kind: str, prompt: int, exact: int) -> Served:
    return Served(kind, prompt, exact, 0, 0, 0, 0, 0)


def test_shares_are_of_the_tokens_of_what_is_counted():
    told = [served("passages", 100, 90), served("passages", 100, 50), served("chat", 300, 150)]
    assert share(told, "exact") == pytest.approx(290 / 500)
    assert share(told, "exact", "passages") == pytest.approx(0.7)
    assert eviction.counted(told, Shape(1)) == told[1:]
    assert eviction.counted(told[1:], Shape(1, chats_from=0.5)) == told[2:]


def test_an_unknown_load_is_named():
    with pytest.raises(typer.BadParameter, match="--load other: allowed are passages"):
        eviction.main(load=["other"])
