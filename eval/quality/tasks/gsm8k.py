"""Few-shot word problems whose examples come in another order each time."""

from __future__ import annotations

from collections.abc import Sequence

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.gsm8k import WordProblem, load_gsm8k
from kvshare_eval.loaders.text import word_count
from kvshare_eval.quality.cases import Case, Group, Prompt, user
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._shared import at_least, chunks, reordered, rng, shuffled

#: A small model goes on with a question of its own, whose number would be the last one.
NEXT_QUESTION = ("\n\nQuestion:",)
_INSTRUCTION = "Answer the last question step by step. End with a line '#### ' and the number."


@register_task("gsm8k", metric="last_number", max_new_tokens=160, stop=NEXT_QUESTION)
def gsm8k(
    data: DataSource, seed: int, *, shots: int = 4, questions: int = 4, max_shot_words: int = 90
) -> Groups:
    """The same worked examples in another order, before another problem.

    Args:
        data: where the problems are.
        seed: decides which problems are examples, which are asked, and the orders.
        shots: how many examples a prompt has.
        questions: how many problems are asked behind the same examples.
        max_shot_words: the longest example, question and answer together.
    """
    at_least("gsm8k", "shots", shots, 2)
    at_least("gsm8k", "questions", questions, 1)
    problems = load_gsm8k(data)
    short = [p for p in problems if word_count(p.question) + word_count(p.worked) <= max_shot_words]
    if len(short) < shots + questions + 1:
        raise EvalError(
            f"option max_shot_words of task gsm8k: only {len(short)} problems are that short"
        )
    order = shuffled(problems, rng(seed, "gsm8k"))
    for index, asked in enumerate(chunks(order, questions + 1)):
        yield _group(f"{index:04d}", asked, short, seed, shots)


def _group(
    name: str, asked: list[WordProblem], short: list[WordProblem], seed: int, shots: int
) -> Group:
    random_ = rng(seed, "gsm8k", name)
    base = random_.sample([problem for problem in short if problem not in asked], shots)
    *measured, earlier = asked
    cases = tuple(
        Case(
            problem.id,
            few_shot(reordered(base, rng(seed, "gsm8k", name, problem.id)), problem),
            (problem.result,),
            few_shot((), problem),
        )
        for problem in measured
    )
    return Group(name, (few_shot(base, earlier),), cases)


def few_shot(shots: Sequence[WordProblem], problem: WordProblem) -> Prompt:
    """The worked examples and the problem, as one user message."""
    examples = "".join(f"Question: {s.question}\nAnswer: {s.worked}\n\n" for s in shots)
    return user(f"{_INSTRUCTION}\n\n{examples}Question: {problem.question}\nAnswer:")
