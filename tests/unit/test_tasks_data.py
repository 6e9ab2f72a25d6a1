"""Single tasks, on small data sets in the original formats and with other options."""

import json
import re
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.text import word_count
from kvshare_eval.quality.cases import Group, Prompt
from kvshare_eval.quality.tasks import find_task
from kvshare_eval.quality.tasks._retrieval import TfIdf
from kvshare_eval.quality.tasks._shared import chunks, document, reordered, rng
from kvshare_eval.quality.tasks.sentences import _merged

pytestmark = pytest.mark.unit

NOTHING = DataSource()


def make(setting: str, data: DataSource, count: int = 100, seed: int = 0) -> list[Group]:
    task, options = find_task(setting)
    return list(islice(task.groups(data, seed, options), count))


def text(prompt: Prompt) -> str:
    return prompt.text or "\n\n".join(message.content for message in prompt.messages)


def put(folder: Path, name: str, content: str) -> DataSource:
    (folder / name).write_text(content, encoding="utf-8")
    return DataSource(folder)


@pytest.fixture
def pairs(tmp_path: Path) -> DataSource:
    """Six passages with two questions each, in two wordings; the last passage is long."""
    contexts = [f"Town {i} has a mayor called Name{i}. It lies at mile {i}0." for i in range(5)]
    contexts.append("Town 5 has a mayor called Name5. " + "It rains a lot there every year. " * 12)
    asked = [
        {
            "ctx": i,
            "question": f"{what} of town {i}?",
            "variant": f"{what} no wait of town {i}?",
            "answers": [f"Name{i}"],
        }
        for i in range(6)
        for what in ("Who is the mayor", "What is the name of the head")
    ]
    return put(
        tmp_path, "disfl_squad_pairs.json", json.dumps({"contexts": contexts, "pairs": asked})
    )


def test_squad_asks_both_wordings(pairs: DataSource) -> None:
    (group,) = make("squad:passages=5,questions=3", pairs)  # six passages: one is left over
    assert [case.id.split("/")[1] for case in group.cases] == ["fluent", "disfluent"] * 3
    assert len({case.id.split("-")[0] for case in group.cases}) == 3  # of three passages
    for fluent, disfluent in zip(group.cases[::2], group.cases[1::2], strict=True):
        assert fluent.answers == disfluent.answers
        assert "no wait" not in text(fluent.prompt)
        assert "no wait" in text(disfluent.prompt)


@pytest.mark.parametrize(("wording", "other"), [("fluent", "disfluent"), ("disfluent", "fluent")])
def test_squad_history_asks_the_other_wording(pairs: DataSource, wording: str, other: str) -> None:
    for group in make(f"squad:passages=2,questions=2,wording={wording},ask_variant=1", pairs):
        assert len(group.history) == len(group.cases) == 2
        for case, earlier in zip(group.cases, group.history, strict=True):
            here, before = text(case.prompt), text(earlier)
            assert ("no wait" in here) == (wording == "disfluent")
            assert ("no wait" in before) == (other == "disfluent")
            question = here.replace("no wait ", "").split("\n\n")[-1]
            assert question == before.replace("no wait ", "").split("\n\n")[-1]
            assert here.split("\n\n")[1] not in {text(e).split("\n\n")[1] for e in group.history}


@pytest.mark.parametrize("donors", ["alone", "sinks", "preamble", "neighbour"])
def test_squad_passages_that_were_encoded_apart(pairs: DataSource, donors: str) -> None:
    for group in make(f"squad:passages=2,questions=2,donors={donors}", pairs):
        assert len(group.history) == 2
        blocks = text(group.cases[0].prompt).split("\n\n")[1:-1]
        assert len(blocks) == 2
        for earlier in group.history:
            (last,) = [block for block in blocks if f"{block}\n\nRead." in earlier.text]
            before = earlier.text.removesuffix(f"{last}\n\nRead.")
            (other,) = [block for block in blocks if block != last]
            assert (before == "") == (donors == "alone")
            assert (before.strip() == "") == (donors in ("alone", "sinks"))
            assert (other in before) == (donors == "neighbour")


def test_squad_passages_that_were_edited_before_they_were_cached(pairs: DataSource) -> None:
    """What is asked about stays as it is; the history has most of its words, and not all."""
    plain, edited = (
        make(f"squad:passages=2,questions=2{o}", pairs) for o in ("", ",edited_percent=30")
    )
    assert [group.cases for group in plain] == [group.cases for group in edited]
    kept = total = 0
    for before, after in zip(plain, edited, strict=True):
        (old,), (new,) = before.history, after.history
        assert text(old) != text(new)
        assert text(old).count("\n") == text(new).count("\n")
        assert text(old).split("\n\n")[-1] == text(new).split("\n\n")[-1]
        blocks = SequenceMatcher(None, text(old).split(), text(new).split()).get_matching_blocks()
        kept, total = kept + sum(b.size for b in blocks), total + len(text(old).split())
    assert 0.6 < kept / total < 0.95
    with pytest.raises(EvalError, match="allowed are 0 to 99"):
        make("squad:edited_percent=100", pairs)


def test_squad_takes_long_passages_last_and_as_excerpts(pairs: DataSource) -> None:
    groups = make("squad:passages=2,questions=2,max_words=40", pairs)
    assert len(groups) == 3
    assert [f"Town {5} " in text(group.history[0]) for group in groups] == [False, False, True]
    blocks = text(groups[2].history[0]).split("\n\n")[1:-1]
    assert max(map(word_count, blocks)) <= 40 + 1  # and "Document:"


def test_squad_wordings_that_cannot_be_asked(pairs: DataSource) -> None:
    with pytest.raises(EvalError, match="allowed are fluent, disfluent, both"):
        make("squad:wording=fluid", pairs)
    with pytest.raises(EvalError, match="needs wording=fluent or disfluent"):
        make("squad:ask_variant=true", pairs)
    with pytest.raises(EvalError, match="use wording=fluent"):
        make("squad:wording=disfluent", NOTHING)
    with pytest.raises(EvalError, match="allowed are together, alone, sinks, preamble, neighbour"):
        make("squad:donors=lonely", pairs)
    with pytest.raises(EvalError, match="needs donors=together"):
        make("squad:wording=fluent,ask_variant=true,donors=alone", pairs)


def test_hotpotqa_keeps_what_supports_the_answer(tmp_path: Path) -> None:
    context = [[f"Title {i}", [f"Sentence {i}."]] for i in range(10)]
    entry: dict[str, Any] = {
        "_id": "h",
        "question": "Which?",
        "answer": "Sentence 8",
        "context": context,
        "supporting_facts": [["Title 8", 0], ["Title 3", 0]],
    }
    source = put(tmp_path, "hotpot_dev_distractor_v1.json", json.dumps([entry]))
    for count in (2, 5, 10):
        (group,) = make(f"hotpotqa:paragraphs={count}", source)
        shown = text(group.cases[0].prompt).split("\n\n")[1:-1]
        assert len(shown) == count
        assert {document(f"Title {i}", f"Sentence {i}.").strip() for i in (3, 8)} <= set(shown)


def test_gsm8k_never_shows_what_it_asks(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} and 1?", "answer": f"#### {n + 1}"} for n in range(12)]
    source = put(tmp_path, "test.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    groups = make("gsm8k:shots=3,questions=2", source)
    asked = [case.id for group in groups for case in group.cases]
    assert len(groups) == 4
    assert len(set(asked)) == 8  # no problem is asked twice
    for group in groups:
        for prompt in (*group.history, *(case.prompt for case in group.cases)):
            *_, question = re.findall(r"Question: (.*)", text(prompt))
            assert text(prompt).count(question) == 1
            assert text(prompt).count("#### ") == 3 + 1  # and the instruction
        for case in group.cases:
            assert case.no_context is not None
            assert re.findall(r"Question: (.*)", text(case.no_context)) == [
                re.findall(r"Question: (.*)", text(case.prompt))[-1]
            ]


def test_qmsum_shows_whole_turns_that_answer_the_queries(tmp_path: Path) -> None:
    def query(number: int, start: int, end: int) -> dict[str, Any]:
        return {
            "query": f"Query {number}?",
            "answer": f"Answer {number}.",
            "relevant_text_span": [[str(start), str(end)]],
        }

    meeting = {
        "meeting_transcripts": [
            {
                "speaker": f"S{i}",
                "content": f"Turn {i} has five words" if i != 3 else "{vocalsound}",
            }
            for i in range(12)
        ],
        "specific_query_list": [
            query(0, 0, 0),
            query(1, 2, 4),
            query(2, 3, 5),
            query(3, 9, 10),
            query(4, 0, 11),  # cannot be answered from a part
        ],
    }
    source = put(tmp_path, "qmsum_test.jsonl", json.dumps(meeting) + "\n")
    groups = make("qmsum:max_words=24", source)
    by_query = {
        re.findall(r"Query \d", text(case.prompt))[0]: set(
            map(int, re.findall(r"Turn (\d+)", text(case.prompt)))
        )
        for group in groups
        for case in group.cases
    }
    assert set(by_query) == {"Query 0", "Query 1", "Query 2", "Query 3"}
    assert by_query["Query 1"] == by_query["Query 2"] >= {2, 4, 5}  # one part serves both
    assert by_query["Query 3"] >= {9, 10}
    assert [len(group.cases) for group in groups] == [2, 1, 1]
    for group in groups:
        heads = [
            text(p).split("\n\n")[0] for p in (*group.history, *(c.prompt for c in group.cases))
        ]
        assert len({head.split()[0] for head in heads}) == len(heads)


@pytest.fixture
def bank(tmp_path: Path) -> DataSource:
    articles = [
        ("PIN", "Your PIN is blocked after three wrong tries."),
        ("Rates", "Exchange rates change daily."),
        ("Cards", "A new card arrives by post."),
        ("Long", "card " * 500),
    ]
    put(
        tmp_path,
        "banking_knowledge_docs.json",
        json.dumps([{"id": t, "title": t, "content": c} for t, c in articles]),
    )
    asked = [("When does my card come?", "card"), ("Is my new card in the post?", "card")]
    asked += [("Why is my PIN blocked?", "pin"), ("Wrong PIN three times", "pin")]
    asked += [("The card?", "card")]  # one too many for a second group
    rows = "".join(f"{question},{intent}\n" for question, intent in asked)
    return put(tmp_path, "banking77_test.csv", "text,category\n" + rows)


def test_support_finds_the_articles_of_an_intent(bank: DataSource) -> None:
    groups = make("support:articles=1,questions=1", bank)
    assert sorted(group.id for group in groups) == ["card-0", "pin-0"]
    for group in groups:
        title = {"card": "Cards", "pin": "PIN"}[group.id.split("-")[0]]
        (earlier,), (case,) = group.history, group.cases
        assert re.findall(r"Article: (.*)", text(case.prompt)) == [title]
        assert re.findall(r"Article: (.*)", text(earlier)) == [title]
        assert case.answers == ()  # BANKING77 has no gold
        assert text(case.prompt).splitlines()[0] != text(earlier).splitlines()[0]


def test_support_needs_both_sets(bank: DataSource) -> None:
    assert bank.folder is not None
    (bank.folder / "banking77_test.csv").unlink()
    with pytest.raises(EvalError, match="banking77 is not in"):
        make("support", bank)


@pytest.mark.parametrize("turns", [1, 2])
def test_chat_cases_are_the_history_without_its_thoughts(turns: int) -> None:
    for group in make(f"chat:turns={turns},passages=2", NOTHING):
        assert len(group.history) == turns
        served = group.history[-1].messages
        assert [m.role for m in served] == ["user", "assistant"] * turns
        assert [m.content.startswith("Thoughts: ") for m in served[1::2]] == [
            *[False] * (turns - 1),
            True,
        ]
        for case in group.cases:
            *before, last = case.prompt.messages
            assert last.role == "user"
            assert "Thoughts:" not in text(case.prompt)
            assert tuple(before[:-1]) == served[:-1]
            thoughts, blank, answer = served[-1].content.partition("\n\n")
            assert blank
            assert word_count(thoughts) >= 20
            assert before[-1].content == answer


def test_chat_moves_answers_by_varying_distances() -> None:
    lengths = {
        word_count(group.history[0].messages[1].content.split("\n\n")[0])
        for group in make("chat", NOTHING)
    }
    assert len(lengths) >= 4


@pytest.mark.parametrize("shots", [0, 2])
def test_sentences_are_encoded_alone_between_newlines(shots: int) -> None:
    for group in make(f"sentences:padding=3,shots={shots}", NOTHING, 5):
        (case,) = group.cases
        assert (case.no_context is None) == (shots == 0)
        for donor in group.history:
            inner = donor.text.strip("\n")
            assert donor.text == f"\n\n\n{inner}\n\n\n"
            assert inner in text(case.prompt)
        joined = "".join("".join(d.text.split()) for d in group.history)
        *_, question = re.findall(r"Question: (.*)", text(case.prompt))
        assert joined.endswith("".join(question.split()))
        assert text(case.prompt).count("Question: ") == shots + 1


def test_merged_sentences() -> None:
    problem = "One two. Three four five. Six. Seven eight nine. Ten."
    assert _merged(problem, 0) == problem.replace(". ", ".|").split("|")
    assert _merged(problem, 4) == ["One two. Three four five.", "Six. Seven eight nine. Ten."]
    assert _merged(problem, 100) == [problem]
    for least in range(12):
        assert " ".join(_merged(problem, least)) == problem
        assert min(map(word_count, _merged(problem, least))) >= min(least, 10)


@pytest.mark.parametrize("keys", [1, 4, 12])
def test_needles_are_all_there_with_one_number_each(keys: int) -> None:
    for group in make(f"needle:keys={keys},words=300", NOTHING, 4):
        assert len(group.cases) == keys
        for case in group.cases:
            found = dict(re.findall(r"numbers for (\S+) is: (\d{7})\.", text(case.prompt)))
            assert len(found) == keys
            assert case.answers == (found[case.id],)


@pytest.mark.parametrize(("chains", "hops"), [(1, 1), (2, 3), (3, 5)])
def test_variables_by_following_the_assignments(chains: int, hops: int) -> None:
    for group in make(f"variables:chains={chains},hops={hops}", NOTHING, 4):
        assert len(group.cases) == chains
        for case in group.cases:
            said = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text(case.prompt)))
            assert len(said) == chains * (hops + 1)

            def value(name: str, said: dict[str, str] = said) -> str:
                return name if name.isdigit() else value(said[name])

            assert {name for name in said if value(name) == case.id} == set(case.answers)


@pytest.mark.parametrize("name", ["needle", "variables"])
def test_words_is_the_length_of_the_filler(name: str) -> None:
    for words in (200, 800):
        for group in make(f"{name}:words={words}", NOTHING, 5):
            sentences = re.findall(r"The \w+ from [^.]*\.", text(group.cases[0].prompt))
            assert abs(sum(map(word_count, sentences)) - words) <= 0.15 * words


def test_reordered_always_begins_differently() -> None:
    items = ["a", "b", "c"]
    orders = {tuple(reordered(items, rng(seed, "x"))) for seed in range(60)}
    assert orders == {("b", "a", "c"), ("b", "c", "a"), ("c", "a", "b"), ("c", "b", "a")}


def test_chunks_are_whole() -> None:
    assert list(chunks(range(7), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(chunks(range(2), 3)) == []


def test_retrieval_by_rare_words() -> None:
    index = TfIdf(["the card and the card", "the card and a PIN", "rates", "PINs"])
    assert index.best("Where is my pin?", 2) == [3, 1]
    assert index.best("card PIN", 1) == [1]
    assert index.best("nothing of this", 4) == [0, 1, 2, 3]  # equal: in their order


def test_poison_puts_the_attack_into_the_history_alone(pairs: DataSource) -> None:
    groups = make("poison:questions=2,preambles=3", pairs)
    assert len(groups) == 6
    for group in groups:
        (attack,) = map(text, group.history)
        for case in group.cases:
            (payload,) = case.answers
            assert attack.count(payload) == 3 * 6
            assert payload not in text(case.prompt)
            shared = text(case.prompt).split("\n\n")[1]
            # What the victim reuses is, word for word, what the attacker has sent.
            assert f"\n\n{shared}\n\n" in attack
            assert len(shared) > 40
    assert len({group.cases[0].answers for group in groups}) > 1
    assert make("poison", pairs, seed=1) != make("poison", pairs, seed=2)
