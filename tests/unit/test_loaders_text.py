"""Tests of sentences and excerpts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare_eval.loaders.text import contains_words, excerpt, sentences, word_count
from kvshare_eval.passages import load_passages

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Mr. Bennet said No. He left.", ["Mr. Bennet said No.", "He left."]),
        (
            "J. M. Barrie wrote it. So did I. We met.",
            ["J. M. Barrie wrote it.", "So did I.", "We met."],
        ),
        ('"Oh dear!" He ran.\n"Late!"', ['"Oh dear!"', "He ran.", '"Late!"']),
        ("It cost 3.50 dollars. 4 were left.", ["It cost 3.50 dollars.", "4 were left."]),
        ("no capital. follows", ["no capital. follows"]),
        ("", []),
        ("  \n ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text(alphabet='AbI .!?"\n3'))
def test_sentences_lose_nothing(text: str) -> None:
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())
    assert all(s == s.strip() and s in text for s in sentences(text))


def test_contains_words() -> None:
    assert contains_words("They live by the Rivers.", "rivers")
    assert not contains_words("They live by the Rivers.", "river")
    assert contains_words("It costs $5 (five).", "$5 (five)")


def test_excerpt_keeps_the_sentences_that_answer() -> None:
    text = "Ann is old. Bob is red. Cid is big. Dot is shy."
    assert excerpt(text, [["Bob"], ["Cid"]], 6) == ("Bob is red. Cid is big.", (0, 1))
    assert excerpt(text, [["Ann"], ["Dot"]], 6) == ("Ann is old. Bob is red.", (0,))  # the earliest
    assert excerpt(text, [["Ann"], ["Dot"]], 12) == (text, (0, 1))
    assert excerpt(text, [["Ann"]], 2) == ("", ())  # no sentence is that short


def test_excerpt_drops_a_question_whose_answer_was_partly_cut() -> None:
    text = "The cat sat. The dog ran. The cat ran."
    assert excerpt(text, [["cat"]], 3) == ("The cat sat.", ())


@pytest.mark.parametrize("max_words", [40, 75, 110])
def test_excerpts_of_the_passages_by_oracle(max_words: int) -> None:
    """No run of whole sentences keeps more questions, and each kept answer is there."""
    for passage in load_passages():
        answers = [question.answers for question in passage.questions]
        text, kept = excerpt(passage.text, answers, max_words)
        assert word_count(text) <= max_words
        assert text in passage.text
        assert all(contains_words(text, answers[index][0]) for index in kept)
        parts = sentences(passage.text)
        runs = [
            parts[i:j]
            for i in range(len(parts))
            for j in range(i + 1, len(parts) + 1)
            if sum(map(word_count, parts[i:j])) <= max_words
        ]
        rest = [[p for p in parts if p not in run] for run in runs]
        best = max(
            (
                sum(
                    any(contains_words(p, accepted[0]) for p in run)
                    and not any(contains_words(p, accepted[0]) for p in left)
                    for accepted in answers
                )
                for run, left in zip(runs, rest, strict=True)
            ),
            default=0,
        )
        assert len(kept) >= best
