"""What every task keeps to, over the small set at hand."""

from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.text import contains_words
from kvshare_eval.quality.cases import Group, Prompt
from kvshare_eval.quality.tasks import METRICS, Task, find_task, tasks

pytestmark = pytest.mark.unit

NAMES = (
    "chat",
    "gsm8k",
    "hotpotqa",
    "needle",
    "qmsum",
    "sentences",
    "squad",
    "support",
    "variables",
)
#: Measured only when they are named.
NAMED_ONLY = ("poison",)
#: Their answers are worked out, and stand nowhere.
WORKED_OUT = ("gsm8k", "sentences")
NOTHING = DataSource()


def text(prompt: Prompt) -> str:
    return prompt.text or "\n\n".join(message.content for message in prompt.messages)


def first(task: Task, count: int, seed: int = 0) -> list[Group]:
    return list(islice(task.groups(NOTHING, seed), count))


def shared_words(prompt: Prompt, history: Sequence[Prompt], block: int) -> float:
    """Share of the words that lie in a run of ``block`` words which the history holds."""
    words = text(prompt).split()
    held = set()
    for earlier in history:
        past = text(earlier).split()
        held |= {tuple(past[i : i + block]) for i in range(len(past) - block + 1)}
    covered = set()
    for i in range(len(words) - block + 1):
        if tuple(words[i : i + block]) in held:
            covered |= set(range(i, i + block))
    return len(covered) / len(words)


def common_prefix_words(one: Prompt, other: Prompt) -> int:
    pairs = zip(text(one).split(), text(other).split(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)


def test_all_tasks_are_found_and_say_what_they_do() -> None:
    assert tuple(sorted((*NAMES, *NAMED_ONLY))) == tuple(tasks())
    assert {name for name, task in tasks().items() if not task.by_default} == set(NAMED_ONLY)
    for task in tasks().values():
        assert task.metric in METRICS
        assert task.doc.endswith(".")
        assert all(type(value) in (int, str, bool) for value in task.defaults().values())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), taken=st.integers(1, 5))
def test_groups_depend_on_the_seed_alone(name: str, seed: int, taken: int) -> None:
    task = tasks()[name]
    groups = first(task, 6, seed)
    assert len(groups) == 6
    assert first(task, taken, seed) == groups[:taken]
    assert first(task, 6, seed + 1) != groups


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_the_same_whoever_else_takes_some(name: str) -> None:
    task = tasks()[name]
    one, other = task.groups(NOTHING, 1), task.groups(NOTHING, 1)
    mixed = [next(one), next(one), next(other), next(one)]
    assert [mixed[0], mixed[1], mixed[3]] == first(task, 3, 1)
    assert mixed[2] == mixed[0]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_unique(name: str) -> None:
    groups = first(tasks()[name], 40)
    assert len({group.id for group in groups}) == len(groups)
    for group in groups:
        assert group.history
        assert group.cases
        assert len({case.id for case in group.cases}) == len(group.cases)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_most_of_a_case_is_in_the_history_but_not_as_a_prefix(name: str, seed: int) -> None:
    block = 4 if name == "sentences" else 8
    for group in first(tasks()[name], 6, seed):
        for case in group.cases:
            assert shared_words(case.prompt, group.history, block) >= 0.5
            exact = max(common_prefix_words(case.prompt, earlier) for earlier in group.history)
            assert exact <= 0.25 * len(text(case.prompt).split())


def test_what_counts_as_shared() -> None:
    """Positive and negative control of the measure above."""
    one, two = Prompt(text="a b c d e f g h"), Prompt(text="x e f g h a b c d")
    assert shared_words(one, [one], 4) == 1
    assert shared_words(two, [one], 4) == 8 / 9
    assert shared_words(two, [one], 5) == 0
    assert common_prefix_words(Prompt(text="a b z"), one) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WORKED_OUT])
@pytest.mark.parametrize("seed", [0, 7])
def test_gold_stands_in_the_prompt_and_not_in_the_question(name: str, seed: int) -> None:
    for group in first(tasks()[name], 30, seed):
        for case in group.cases:
            assert case.answers
            every = all if name == "variables" else any
            assert every(contains_words(text(case.prompt), answer) for answer in case.answers)
            assert case.no_context is not None
            alone = text(case.no_context)
            assert not any(contains_words(alone, answer) for answer in case.answers[:1])
            asked = alone.removeprefix("Question: ").removeprefix("Query: ")
            assert asked in text(case.prompt)


@pytest.mark.parametrize("name", NAMES)
def test_length_with_the_defaults(name: str) -> None:
    """About 500 to 650 tokens; the paper's protocol has the bare problem."""
    shortest, longest = (30, 80) if name == "sentences" else (190, 540)
    for group in first(tasks()[name], 10):
        for case in group.cases:
            assert shortest <= len(text(case.prompt).split()) <= longest


@pytest.mark.parametrize("name", ["gsm8k", "hotpotqa", "needle", "squad", "variables"])
def test_blocks_are_the_same_text_in_another_order(name: str) -> None:
    for group in first(tasks()[name], 6):
        (earlier,) = group.history
        instruction, *before, _ = text(earlier).split("\n\n")
        for case in group.cases:
            head, *blocks, question = text(case.prompt).split("\n\n")
            assert head == instruction
            assert sorted(blocks) == sorted(before)
            assert blocks[0] != before[0]
            assert question not in text(earlier)


@pytest.mark.parametrize("name", NAMES)
def test_the_history_does_not_ask_the_case(name: str) -> None:
    for group in first(tasks()[name], 6):
        asked = {text(case.prompt).split("\n\n")[-1] for case in group.cases}
        assert len(asked) == len(group.cases)
        assert not asked & {text(earlier).split("\n\n")[-1] for earlier in group.history}


@pytest.mark.parametrize(
    "setting",
    [
        "squad:passages=1",
        "squad:questions=0",
        "hotpotqa:paragraphs=1",
        "gsm8k:shots=1",
        "gsm8k:max_shot_words=5",
        "qmsum:max_words=0",
        "support:articles=0",
        "support:max_words=50",
        "chat:turns=0",
        "sentences:shots=-1",
        "needle:keys=0",
        "needle:keys=200",
        "variables:hops=0",
    ],
)
def test_options_out_of_range_are_refused_by_name(setting: str) -> None:
    task, options = find_task(setting)
    (option,) = options
    with pytest.raises(RuntimeError, match=rf"option {option} of task {task.name}: "):
        next(task.groups(NOTHING, 0, options))
