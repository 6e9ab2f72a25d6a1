"""Tests of the public-domain passages and of the prompts made of them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.passages import (
    Passage,
    Question,
    build_prompt,
    load_passages,
    render_passage,
)

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {
    "licence": "public domain",
    "passages": [
        {
            "id": "one",
            "title": "One",
            "author": "Nobody",
            "year": 1900,
            "text": "A cat sat on a Mat.\nIt slept.",
            "questions": [{"question": "Where did the cat sit?", "answers": ["a mat"]}],
        }
    ],
}


@pytest.fixture(scope="module")
def passages() -> tuple[Passage, ...]:
    return load_passages()


def test_counts_and_lengths(passages: tuple[Passage, ...]) -> None:
    assert len(passages) == 30
    for passage in passages:
        assert 120 <= len(passage.text.split()) <= 220, passage.id
        assert len(passage.questions) == 3, passage.id
        assert passage.text.isascii(), passage.id
        assert passage.year < 1929, passage.id


def test_ids_works_and_questions_are_unique(passages: tuple[Passage, ...]) -> None:
    assert len({passage.id for passage in passages}) == len(passages)
    assert len({passage.title for passage in passages}) == len(passages)
    questions = [question.question for passage in passages for question in passage.questions]
    assert len(set(questions)) == len(questions)


def test_answers_are_in_the_text(passages: tuple[Passage, ...]) -> None:
    for passage in passages:
        for question in passage.questions:
            assert question.question.endswith("?")
            assert question.answers
            for answer in question.answers:
                assert answer.lower() in passage.text.lower(), (passage.id, answer)


def test_a_passage_renders_equal_at_any_place(passages: tuple[Passage, ...]) -> None:
    chosen = passages[0]
    block = render_passage(chosen)
    others = list(passages[1:4])
    for place in range(len(others) + 1):
        shown = [*others[:place], chosen, *others[place:]]
        prompt = build_prompt(shown, chosen.questions[0])
        assert prompt.count("\n\n" + block) == 1
        before, after = prompt.split(block)
        assert before.endswith("\n\n")
        assert before.count("Document: ") == place
        assert after.startswith("Document: " if place < len(others) else "Question: ")


def test_prompt_is_exact() -> None:
    question = Question("Why?", ("because",))
    first = Passage("a", "A", "x", 1900, "because.", (question,))
    second = Passage("b", "B", "y", 1901, "Two\nlines.", (question,))
    expected = (
        "Read.\n\nDocument: B\nTwo\nlines.\n\nDocument: A\nbecause.\n\n"
        "Question: Why?\nAnswer with a few words only."
    )
    assert build_prompt([second, first], question, system="Read.") == expected
    assert build_prompt([second, first], "Why?", system="Read.") == expected


def test_loads_a_given_file(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    (passage,) = load_passages(path)
    assert passage.text == "A cat sat on a Mat.\nIt slept."
    assert passage.questions == (Question("Where did the cat sit?", ("a mat",)),)


def _set(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["passages"][0].__setitem__(field, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data.pop("licence"), r"field 'licence': missing"),
        (lambda data: data.__setitem__("passages", {}), r"field 'passages': expected a non-empty"),
        (lambda data: data["passages"].append(3), r"passage 1: expected an object"),
        (lambda data: data["passages"][0].pop("title"), r"passage 0 \(one\): field 'title': miss"),
        (lambda data: data["passages"].append(data["passages"][0]), r"passage 1: field 'id'"),
        (_set("id", ""), r"passage 0: field 'id'"),
        (_set("title", "two\nlines"), r"passage 0 \(one\): field 'title': expected one unpadded"),
        (_set("year", "1900"), r"passage 0 \(one\): field 'year'"),
        (_set("year", True), r"passage 0 \(one\): field 'year'"),
        (_set("text", "A mat.\n\nA cat."), r"passage 0 \(one\): field 'text'"),
        (_set("questions", []), r"passage 0 \(one\): field 'questions'"),
        (
            _set("questions", [{"question": "Who?", "answers": ["dog"]}]),
            r"passage 0 \(one\): question 0: field 'answers': 'dog'",
        ),
        (
            _set("questions", [{"answers": ["a mat"]}]),
            r"passage 0 \(one\): question 0: field 'question': missing",
        ),
    ],
)
def test_malformed_content_is_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    data = copy.deepcopy(GOOD)
    spoil(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_passages(path)


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json: not valid JSON"):
        load_passages(path)
