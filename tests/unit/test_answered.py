"""Lengths of the answers to similar prompts: the namespace's own, the nearest first, bounded."""

import numpy as np
import pytest

from sglang_kvshare.matching.answered import AnsweredPrompts
from sglang_kvshare.matching.sketch import Sketcher

pytestmark = pytest.mark.unit

VOCABULARY, DIMS = 600, 48
TABLE = np.random.default_rng(0).standard_normal((VOCABULARY, DIMS)).astype(np.float32)


def prompts(most=100):
    return AnsweredPrompts(Sketcher(TABLE, size_tokens=16, dims=DIMS), most)


def text(seed, tokens=16):
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens)


def test_the_end_of_a_prompt_tells_how_long_its_answer_was():
    answered = prompts()
    brief, long = text(1), text(2)
    for seed in range(10, 14):
        answered.add(b"a", np.r_[text(seed, 50), brief], 5)
        answered.add(b"a", np.r_[text(seed, 50), long], 300 + seed)
    assert answered.neighbours(b"a", np.r_[text(99, 70), brief]) == (5, 5, 5, 5)
    # Equal ones come as they were added.
    assert answered.neighbours(b"a", np.r_[text(99, 70), long]) == (310, 311, 312, 313)
    assert answered.neighbours(b"a", text(3, 40)) == ()


def test_nobody_is_told_of_another_namespace():
    answered = prompts()
    answered.add(b"a", text(1), 5)
    assert answered.neighbours(b"a", text(1)) == (5,)
    assert answered.neighbours(b"b", text(1)) == ()


def test_the_oldest_leave():
    answered = prompts(most=3)
    for number in range(5):
        answered.add(b"a", text(number), number)
    assert len(answered) == 3
    assert [answered.neighbours(b"a", text(number)) for number in range(5)] == [
        (),
        (),
        (2,),
        (3,),
        (4,),
    ]


def test_a_tenant_is_forgotten_and_others_are_not():
    answered = prompts()
    answered.add(b"a", text(1), 5, "alice")
    answered.add(b"b", text(1), 6, "bob")
    answered.add(b"a", text(2), 7)
    assert answered.forget("alice") == {b"a"}
    assert answered.forget("alice") == set()
    assert len(answered) == 2
    assert answered.neighbours(b"a", text(1)) == ()
    assert answered.neighbours(b"b", text(1)) == (6,)
    assert answered.neighbours(b"a", text(2)) == (7,)
    # What leaves next is what is oldest now.
    for number in range(200):
        answered.add(b"c", text(1000 + number), 1)
    assert len(answered) == 100


def test_prompts_that_say_nothing_are_passed_over():
    answered = prompts()
    answered.add(b"a", np.zeros(0, dtype=np.int64), 5)
    assert len(answered) == 0
    assert answered.neighbours(b"a", np.zeros(0, dtype=np.int64)) == ()
