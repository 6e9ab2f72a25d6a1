"""GSM8K: word problems with worked answers that end in ``#### n``.

Files: the published ``test.jsonl``. Built in: generated problems of the same form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvshare_eval.loaders.files import DataSet, HubSet, Row, parsed, read_jsonl
from kvshare_eval.loaders.hub import fetch
from kvshare_eval.loaders.source import DataSource
from kvshare_eval.loaders.word_problems import generate_problems

GSM8K = DataSet("gsm8k", ("gsm8k_test.jsonl", "test.jsonl"), HubSet("openai/gsm8k", "test", "main"))
_BUILT_IN_PROBLEMS = 600
_CALCULATOR = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class WordProblem:
    """A word problem.

    Attributes:
        id: unique within the set.
        question: the problem, one line.
        worked: the worked answer with ``#### n`` as its last line, without the set's calculator
            marks (``<<2+3=5>>``), which a model would only copy.
        result: ``n``, digits without separators.
    """

    id: str
    question: str
    worked: str
    result: str


def load_gsm8k(source: DataSource) -> tuple[WordProblem, ...]:
    """The problems in the order of the file."""
    place = GSM8K.find(source)
    if place is None:
        pairs = generate_problems(seed=0, count=_BUILT_IN_PROBLEMS)
        return tuple(
            _problem(str(i), question, worked) for i, (question, worked) in enumerate(pairs)
        )
    rows = fetch(place) if isinstance(place, HubSet) else read_jsonl(place)
    name = place.path if isinstance(place, HubSet) else place.name

    def make(index: int, row: Row) -> WordProblem:
        where = f"{name}: entry {index}"
        return parsed(lambda r: _problem(str(index), r["question"], r["answer"]), row, where)

    return tuple(make(index, row) for index, row in enumerate(rows))


def _problem(identity: str, question: str, answer: str) -> WordProblem:
    worked = _CALCULATOR.sub("", answer).strip()
    _, mark, result = worked.rpartition("####")
    if not mark:
        raise ValueError("field 'answer' has no line '#### n'")
    return WordProblem(
        identity, " ".join(question.split()), worked, result.strip().replace(",", "")
    )
