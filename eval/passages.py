"""Short public-domain passages with questions, and the retrieval prompts made of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

DEFAULT_SYSTEM = "Answer the question from the documents below."


@dataclass(frozen=True)
class Question:
    """One question about a passage.

    Attributes:
        question: The question as asked, one line.
        answers: Accepted answers, at least one, each a part of the passage's text in any case.
    """

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """One passage of a public-domain work.

    Attributes:
        id: Short name, unique within a file.
        title: Title of the work, one line.
        author: Author of the work.
        year: Year of first publication (AD); for a translation, the translation's.
        text: The passage itself: paragraphs one line each, no blank lines, not padded.
        questions: Questions that this passage answers, at least one.
    """

    id: str
    title: str
    author: str
    year: int
    text: str
    questions: tuple[Question, ...]


def load_passages(path: Path | None = None) -> tuple[Passage, ...]:
    """Read a passages file.

    Args:
        path: The JSON file; the one packaged with the project when None.

    Returns:
        The passages in file order.

    Raises:
        ValueError: The content is malformed; the message names the entry and the field.
    """
    if path is None:
        packaged = resources.files("kvshare_eval").joinpath("data", "passages.json")
        raw, source = packaged.read_text(encoding="utf-8"), "passages.json"
    else:
        raw, source = path.read_text(encoding="utf-8"), str(path)
    try:
        document = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not valid JSON: {error}") from error
    _string(document, "licence", source)
    passages = tuple(
        _passage(entry, f"{source}: passage {index}")
        for index, entry in enumerate(_list(document, "passages", source))
    )
    seen: set[str] = set()
    for index, passage in enumerate(passages):
        if passage.id in seen:
            raise ValueError(
                f"{source}: passage {index}: field 'id': {passage.id!r} is already taken"
            )
        seen.add(passage.id)
    return passages


def render_passage(passage: Passage) -> str:
    """Return a passage as it stands in every prompt, including the blank line that ends it."""
    return f"Document: {passage.title}\n{passage.text}\n\n"


def build_prompt(
    passages: Sequence[Passage], question: Question | str, *, system: str = DEFAULT_SYSTEM
) -> str:
    """Render a retrieval-style user message.

    The order of the passages is kept. A passage reads the same in every prompt, with a blank line
    before and after it, wherever it stands.

    Args:
        passages: The documents to answer from, in the order to show them.
        question: The question to ask about them.
        system: The instruction that opens the message, one line.

    Returns:
        The whole message, without a chat template.
    """
    asked = question if isinstance(question, str) else question.question
    documents = "".join(render_passage(passage) for passage in passages)
    return f"{system}\n\n{documents}Question: {asked}\nAnswer with a few words only."


def _passage(entry: object, where: str) -> Passage:
    """Check and convert one entry of the file; `where` names it in errors."""
    name = _line(entry, "id", where)
    where = f"{where} ({name})"
    text = _string(entry, "text", where)
    if text != text.strip() or "\n\n" in text:
        raise ValueError(f"{where}: field 'text': must be unpadded and without blank lines")
    return Passage(
        id=name,
        title=_line(entry, "title", where),
        author=_line(entry, "author", where),
        year=_year(entry, where),
        text=text,
        questions=tuple(
            _question(item, text, f"{where}: question {index}")
            for index, item in enumerate(_list(entry, "questions", where))
        ),
    )


def _question(item: object, text: str, where: str) -> Question:
    """Check and convert one question; every answer must occur in `text` in some case."""
    answers: list[str] = []
    for answer in _list(item, "answers", where):
        if not isinstance(answer, str) or not answer or answer.lower() not in text.lower():
            raise ValueError(f"{where}: field 'answers': {answer!r} is not in the passage's text")
        answers.append(answer)
    return Question(question=_line(item, "question", where), answers=tuple(answers))


def _field(entry: object, field: str, where: str) -> Any:
    """Return one field of a JSON object, which must hold it."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object with field {field!r}, got {entry!r}")
    if field not in entry:
        raise ValueError(f"{where}: field {field!r}: missing")
    return entry[field]


def _string(entry: object, field: str, where: str) -> str:
    """Return a field that must be a string with something in it."""
    value = _field(entry, field, where)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: field {field!r}: expected a non-empty string, got {value!r}")
    return value


def _line(entry: object, field: str, where: str) -> str:
    """Return a field that must be a single, unpadded line."""
    value = _string(entry, field, where)
    if value != value.strip() or "\n" in value:
        raise ValueError(f"{where}: field {field!r}: expected one unpadded line, got {value!r}")
    return value


def _list(entry: object, field: str, where: str) -> list[object]:
    """Return a field that must be a list with something in it."""
    value = _field(entry, field, where)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: field {field!r}: expected a non-empty list, got {value!r}")
    return value


def _year(entry: object, where: str) -> int:
    """Return the year of an entry, which must be a whole number."""
    value = _field(entry, "year", where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}: field 'year': expected a whole number, got {value!r}")
    return value
