"""Tests of the loaders, on small samples in the original formats."""

import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.banking77 import CustomerQuestion, load_banking77
from kvshare_eval.loaders.gsm8k import load_gsm8k
from kvshare_eval.loaders.help_centre import load_articles
from kvshare_eval.loaders.hotpotqa import load_hotpotqa
from kvshare_eval.loaders.qmsum import Turn, load_qmsum
from kvshare_eval.loaders.squad import load_squad
from kvshare_eval.loaders.text import contains_words, word_count
from kvshare_eval.loaders.traces import TraceRequest, load_azure_trace, load_mooncake_trace
from kvshare_eval.loaders.word_problems import generate_problems

pytestmark = pytest.mark.unit

SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "River_Otter",
            "paragraphs": [
                {
                    "context": "Otters eat fish.\n\nThey live by rivers.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": " What do otters eat? ",
                            "answers": [
                                {"text": "fish", "answer_start": 11},
                                {"text": "fish", "answer_start": 11},
                            ],
                        },
                        {"id": "q2", "question": "Unanswerable?", "answers": []},
                    ],
                },
                {"context": "Nobody asks about this.", "qas": []},
            ],
        }
    ],
}
PAIRS = {
    "contexts": ["Never asked.", "Otters eat fish."],
    "pairs": [
        {"ctx": 1, "question": "What?", "variant": "Who no what?", "answers": ["fish"]},
        {"ctx": 1, "question": "Who?", "variant": "Where no who?", "answers": ["Otters"]},
    ],
}
HOTPOT = [
    {
        "_id": "h1",
        "question": "Where does the author of Mudlark live?",
        "answer": "Oslo",
        "supporting_facts": [["Mudlark", 0], ["Ann Lee", 1]],
        "context": [
            ["Mudlark", ["Mudlark is a book.", " Ann Lee wrote it."]],
            ["Ann Lee", ["She writes.", " She lives in Oslo."]],
            ["Bergen", ["A town."]],
        ],
    }
]
HOTPOT_UNMARKED = [
    {
        "id": "h2",
        "question": "Where does the author of Mudlark live?",
        "answer": "Oslo",
        "ctxs": [
            {"title": "Bergen", "text": "A town."},
            {"title": "Mudlark (book)", "text": "Ann Lee wrote it."},
            {"title": "Ann Lee", "text": "She lives in Oslo."},
        ],
    }
]
GSM8K = {
    "question": "Two and  two?",
    "answer": "It is 2+2=<<2+2=4>>4 thousand.\n#### 4,000",
}
QMSUM = {
    "topic_list": [],
    "general_query_list": [{"query": "Summarize the whole meeting.", "answer": "Talk."}],
    "specific_query_list": [
        {"query": "What cost?", "answer": "Twelve.", "relevant_text_span": [["1", "2"], ["4", "5"]]}
    ],
    "meeting_transcripts": [
        {"speaker": "PM", "content": "{vocalsound} So , hello ."},
        {"speaker": "ID", "content": "{disfmarker}"},
    ],
}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.1805901,12,7\n"
)
MOONCAKE = [
    {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
]


def put(folder: Path, name: str, text: str) -> DataSource:
    """Write one file, compressed if its name says so."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return DataSource(folder)


def lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["dev-v1.1.json", "train-v1.1.json.gz"])
def test_squad_as_published(tmp_path: Path, name: str) -> None:
    (passage,) = load_squad(put(tmp_path, name, json.dumps(SQUAD)))
    assert passage.title == "River Otter"
    assert passage.text == "Otters eat fish.\nThey live by rivers."  # one block
    (question,) = passage.questions
    assert (question.id, question.question, question.variant) == ("q1", "What do otters eat?", "")
    assert question.answers == ("fish",)


@pytest.mark.parametrize("name", ["disfl_squad_pairs.json", "disfl_squad_pairs.json.gz"])
def test_squad_in_two_wordings(tmp_path: Path, name: str) -> None:
    (passage,) = load_squad(put(tmp_path, name, json.dumps(PAIRS)))
    assert (passage.id, passage.title, passage.text) == ("1", "", "Otters eat fish.")
    assert [(q.id, q.variant) for q in passage.questions] == [
        ("1-0", "Who no what?"),
        ("1-1", "Where no who?"),
    ]


def test_hotpotqa_as_published(tmp_path: Path) -> None:
    source = put(tmp_path, "hotpot_dev_distractor_v1.json", json.dumps(HOTPOT))
    (question,) = load_hotpotqa(source)
    assert (question.id, question.answers) == ("h1", ("Oslo",))
    assert question.paragraphs[0].text == "Mudlark is a book. Ann Lee wrote it."
    assert [p.supports for p in question.paragraphs] == [True, True, False]


def test_hotpotqa_without_marks_finds_what_supports(tmp_path: Path) -> None:
    source = put(tmp_path, "hotpotqa_distractor_100.json.gz", json.dumps(HOTPOT_UNMARKED))
    (question,) = load_hotpotqa(source)
    assert [p.supports for p in question.paragraphs] == [False, True, True]


@pytest.mark.parametrize("name", ["test.jsonl", "gsm8k_test.jsonl.gz"])
def test_gsm8k(tmp_path: Path, name: str) -> None:
    (problem,) = load_gsm8k(put(tmp_path, name, lines([GSM8K])))
    assert problem.question == "Two and two?"
    assert problem.worked == "It is 2+2=4 thousand.\n#### 4,000"
    assert problem.result == "4000"


def test_gsm8k_without_a_result_is_refused(tmp_path: Path) -> None:
    source = put(tmp_path, "test.jsonl", lines([GSM8K, {**GSM8K, "answer": "4"}]))
    with pytest.raises(EvalError, match=r"test\.jsonl: entry 1: .*#### n"):
        load_gsm8k(source)


@pytest.mark.parametrize("name", ["qmsum_test.jsonl.gz", "ALL/jsonl/test.jsonl"])
def test_qmsum(tmp_path: Path, name: str) -> None:
    (meeting,) = load_qmsum(put(tmp_path, name, lines([QMSUM])))
    assert meeting.turns == (Turn("PM", "So , hello ."), Turn("ID", ""))
    (query,) = meeting.queries  # not the one about the whole meeting
    assert (query.query, query.answers, query.first, query.last) == (
        "What cost?",
        ("Twelve.",),
        1,
        5,
    )


@pytest.mark.parametrize("name", ["banking77_test.csv.gz", "banking_data/test.csv"])
def test_banking77(tmp_path: Path, name: str) -> None:
    text = 'text,category\n"My card, where\nis it?",card_arrival\n'
    assert load_banking77(put(tmp_path, name, text)) == (
        CustomerQuestion("My card, where is it?", "card_arrival"),
    )


def test_help_centre(tmp_path: Path) -> None:
    entry = {"id": "a", "title": "Cards\n and PINs", "content": "\n## Cards\n\nBlock them.\n"}
    source = put(tmp_path, "banking_knowledge_docs.json.gz", json.dumps([entry]))
    (article,) = load_articles(source)
    assert (article.title, article.text) == ("Cards and PINs", "## Cards\n\nBlock them.")


@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_code.csv", "azure_llm_2023_code.csv.gz"])
def test_azure_trace(tmp_path: Path, name: str) -> None:
    source = put(tmp_path, name, AZURE)
    assert list(load_azure_trace(source, "code")) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(3.5, 12, 7),
    ]
    with pytest.raises(EvalError, match="azure-conv"):
        load_azure_trace(source)
    with pytest.raises(EvalError, match="allowed are conv, code"):
        load_azure_trace(source, "mail")


def test_mooncake_trace_is_a_stream(tmp_path: Path) -> None:
    text = lines(MOONCAKE) + "torn"
    trace = load_mooncake_trace(put(tmp_path, "mooncake_conversation_trace.jsonl", text))
    assert next(trace) == TraceRequest(0.0, 600, 5, (0, 1))
    assert next(trace) == TraceRequest(0.5, 700, 6, (0, 2))
    with pytest.raises(EvalError, match=r"mooncake_conversation_trace\.jsonl:3"):
        next(trace)


LOADERS = [load_squad, load_hotpotqa, load_gsm8k, load_qmsum, load_articles, load_banking77]


@pytest.mark.parametrize("load", LOADERS)
def test_something_is_at_hand_without_a_source(load: Any) -> None:
    assert len(load(DataSource())) >= 5


@pytest.mark.parametrize("load", [load_azure_trace, load_mooncake_trace])
def test_no_trace_is_made_up(load: Any) -> None:
    with pytest.raises(EvalError, match=r"^trace \S+: accepted are the files .*_?conv"):
        load(DataSource())


@pytest.mark.parametrize("load", [*LOADERS, load_azure_trace, load_mooncake_trace])
def test_a_folder_without_the_set_is_refused(tmp_path: Path, load: Any) -> None:
    with pytest.raises(EvalError, match=r"accepted are the files .*\(also \.gz\)"):
        load(DataSource(tmp_path))
    with pytest.raises(EvalError, match="is not there"):
        load(DataSource(tmp_path / "nowhere"))


def test_the_error_names_every_file_and_the_hub_name(tmp_path: Path) -> None:
    with pytest.raises(EvalError) as error:
        load_squad(DataSource(tmp_path))
    for name in ("disfl_squad_pairs.json", "dev-v1.1.json", "train-v1.1.json", "rajpurkar/squad"):
        assert name in str(error.value)


def test_a_missing_field_is_named_with_its_place(tmp_path: Path) -> None:
    rows = [GSM8K, {"question": "No answer?"}]
    with pytest.raises(EvalError, match="entry 1: field 'answer' is missing"):
        load_gsm8k(put(tmp_path, "test.jsonl", lines(rows)))
    with pytest.raises(EvalError, match=r"dev-v1\.1\.json: field 'data' is missing"):
        load_squad(put(tmp_path, "dev-v1.1.json", "{}"))


def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    source = put(tmp_path, "dev-v1.1.json", "{")
    with pytest.raises(EvalError, match=r"dev-v1\.1\.json is not valid JSON"):
        load_squad(source)
    whole = gzip.compress(lines([GSM8K] * 50).encode())
    (tmp_path / "gsm8k_test.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EvalError, match=r"gsm8k_test\.jsonl\.gz cannot be read"):
        load_gsm8k(source)


HUB_ROWS: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {
    ("rajpurkar/squad", None, "validation"): [
        {
            "id": f"q{index}",
            "title": "River_Otter",
            "context": "Otters eat fish.",
            "question": question,
            "answers": {"text": ["fish", "fish"], "answer_start": [11, 11]},
        }
        for index, question in enumerate(["What do otters eat?", "What is eaten?"])
    ],
    ("hotpotqa/hotpot_qa", "distractor", "validation"): [
        {
            "id": "h1",
            "question": "Where?",
            "answer": "Oslo",
            "supporting_facts": {"title": ["Ann Lee"], "sent_id": [0]},
            "context": {"title": ["Ann Lee", "Bergen"], "sentences": [["In", " Oslo."], ["Town."]]},
        }
    ],
    ("openai/gsm8k", "main", "test"): [GSM8K],
    ("mteb/banking77", None, "test"): [{"text": "Where?", "label": 1, "label_text": "arrival"}],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> DataSource:
    """A hub that knows four data sets under exactly these names, and nothing else."""
    fake = ModuleType("datasets")

    def load_dataset(path: str, name: str | None = None, *, split: str) -> list[dict[str, Any]]:
        return HUB_ROWS[path, name, split]

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return DataSource(hub=True)


def test_sets_from_the_hub(hub: DataSource) -> None:
    (passage,) = load_squad(hub)
    assert [question.id for question in passage.questions] == ["q0", "q1"]
    assert (passage.title, passage.questions[0].answers) == ("River Otter", ("fish",))
    (question,) = load_hotpotqa(hub)
    assert [(p.title, p.text, p.supports) for p in question.paragraphs] == [
        ("Ann Lee", "In Oslo.", True),
        ("Bergen", "Town.", False),
    ]
    assert load_gsm8k(hub)[0].result == "4000"
    assert load_banking77(hub) == (CustomerQuestion("Where?", "arrival"),)


def test_a_folder_comes_before_the_hub(tmp_path: Path, hub: DataSource) -> None:
    put(tmp_path, "test.jsonl", lines([{**GSM8K, "answer": "#### 5"}]))
    both = DataSource(tmp_path, hub=True)
    assert load_gsm8k(both)[0].result == "5"
    assert load_squad(both)[0].title == "River Otter"  # the folder lacks it


@pytest.mark.parametrize("load", [load_qmsum, load_articles, load_mooncake_trace])
def test_what_the_hub_does_not_have(hub: DataSource, load: Any) -> None:
    with pytest.raises(EvalError, match=r"is not in the hub: .*no hub name"):
        load(hub)


def test_a_hub_that_fails_and_a_hub_without_its_package(
    hub: DataSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(EvalError, match="the hub does not give openai/gsm8k"):
        load_gsm8k(hub)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvalError, match=r"needs the package datasets: pip install"):
        load_gsm8k(hub)


def test_generated_problems_are_right_and_varied() -> None:
    """Every line's calculation is recomputed; the result is that of the last line."""
    problems = list(generate_problems(seed=3, count=280))
    for question, worked in problems:
        *steps, last = worked.splitlines()
        results = []
        for step in steps:
            found = re.search(r"(\d[\d */+-]*) = (\d+)", step)
            assert found, step
            value = eval(found[1])
            assert value == int(found[2]), step
            results.append(int(value))
        assert last == f"#### {results[-1]}"
        assert results[-1] >= 0
        assert question.endswith("?")
    shapes = {re.sub(r"\d+|\b[A-Z]\w*", "", question) for question, _ in problems}
    assert len(shapes) >= 12
    assert list(generate_problems(seed=3, count=280)) == problems
    assert next(generate_problems(seed=4, count=1)) != problems[0]


def test_the_made_up_bank() -> None:
    articles = {article.id: article for article in load_articles(DataSource())}
    questions = load_banking77(DataSource())
    assert len(articles) == 12
    assert all(100 <= word_count(article.text) <= 180 for article in articles.values())
    assert len(questions) == 36
    for question in questions:
        holding = [a.id for a in articles.values() if contains_words(a.text, question.answers[0])]
        assert holding == [question.intent]
