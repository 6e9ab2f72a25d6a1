"""HotpotQA with distractors: a question over ten paragraphs, two of which answer it together.

Files: the published ``hotpot_dev_distractor_v1.json``, or ``[{"question", "answer", "ctxs":
[{"title", "text"}]}]``. Built in: excerpts of the public-domain passages and cards of a library
that holds them, where a question needs an excerpt and the card of the same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_json
from kvshare_eval.loaders.hub import fetch
from kvshare_eval.loaders.source import DataSource
from kvshare_eval.loaders.text import contains_words, excerpt
from kvshare_eval.passages import Passage, load_passages

HOTPOTQA = DataSet(
    "hotpotqa",
    ("hotpot_dev_distractor_v1.json", "hotpotqa_distractor_100.json"),
    HubSet("hotpotqa/hotpot_qa", "validation", "distractor"),
)
_WORKS = 5
_EXCERPT_WORDS = 75


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; ``supports`` says whether the answer needs it, as far as can be told."""

    title: str
    text: str
    supports: bool = False


@dataclass(frozen=True)
class MultiHopQuestion:
    """A question, its answers, and its paragraphs in the order of the file."""

    id: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[Paragraph, ...]


def load_hotpotqa(source: DataSource) -> tuple[MultiHopQuestion, ...]:
    """The questions in the order of the file.

    Where a file does not mark the supporting paragraphs, those count as such that hold the answer
    or whose title stands in the question.
    """
    place = HOTPOTQA.find(source)
    if place is None:
        return tuple(_built_in())
    if isinstance(place, HubSet):
        return tuple(parsed(_from_hub, row, place.path) for row in fetch(place))
    return tuple(
        parsed(_from_file, entry, f"{place.name}: entry {index}")
        for index, entry in enumerate(read_json(place))
    )


def _from_file(entry: Row) -> MultiHopQuestion:
    if "ctxs" in entry:
        pairs = [(item["title"], item["text"]) for item in entry["ctxs"]]
    else:
        pairs = [(title, "".join(sentences)) for title, sentences in entry["context"]]
    marked = {title for title, _ in entry.get("supporting_facts", ())}
    identity = str(entry.get("id") or entry["_id"])
    return _question(identity, entry["question"], entry["answer"], pairs, marked)


def _from_hub(row: Row) -> MultiHopQuestion:
    context = row["context"]
    pairs = [
        (title, "".join(sentences))
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    marked = set(row["supporting_facts"]["title"])
    return _question(str(row["id"]), row["question"], row["answer"], pairs, marked)


def _question(
    identity: str, question: str, answer: str, pairs: list[tuple[str, str]], marked: set[str]
) -> MultiHopQuestion:
    paragraphs = tuple(
        Paragraph(title.strip(), " ".join(text.split()), title in marked) for title, text in pairs
    )
    if not marked:
        paragraphs = tuple(
            replace(paragraph, supports=_seems_to_support(paragraph, question, answer))
            for paragraph in paragraphs
        )
    return MultiHopQuestion(identity, question.strip(), (answer.strip(),), paragraphs)


def _seems_to_support(paragraph: Paragraph, question: str, answer: str) -> bool:
    whole = f"{paragraph.title} {paragraph.text}"
    holds_answer = answer.lower() not in {"yes", "no"} and contains_words(whole, answer)
    title = paragraph.title.split(" (")[0]
    return holds_answer or contains_words(question, title)


def _built_in() -> Iterator[MultiHopQuestion]:
    works = load_passages()
    for index, work in enumerate(works):
        asked = work.questions[index % len(work.questions)]
        text, kept = excerpt(work.text, [asked.answers], _EXCERPT_WORDS)
        if not kept:
            continue
        others = [works[(index + step * 7) % len(works)] for step in range(1, _WORKS)]
        excerpts = [excerpt(other.text, [], _EXCERPT_WORDS)[0] for other in others]
        shelf = _shelf(works.index(work))
        yield MultiHopQuestion(
            work.id,
            "On which shelf does the library keep the work whose text answers this: "
            f"{asked.question}",
            (shelf, f"shelf {shelf}"),
            (
                Paragraph(work.title, text, supports=True),
                _card(work, shelf, supports=True),
                *(
                    Paragraph(other.title, part)
                    for other, part in zip(others, excerpts, strict=True)
                    if part
                ),
                *(_card(other, _shelf(works.index(other))) for other in others),
            ),
        )


def _card(work: Passage, shelf: str, *, supports: bool = False) -> Paragraph:
    author = work.author.split(",")[0]
    text = f"The library keeps {work.title} by {author}, of {work.year}, on shelf {shelf}."
    return Paragraph(f"Library card, {work.title}", text, supports)


def _shelf(index: int) -> str:
    return f"{'ABCDEFGH'[index * 5 % 8]}{11 + index * 37 % 83}"
