"""The protocol of the KVShare paper (arXiv 2503.16525): a prompt's own sentences as donors."""

from __future__ import annotations

from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.gsm8k import WordProblem, load_gsm8k
from kvshare_eval.loaders.text import sentences as split
from kvshare_eval.loaders.text import word_count
from kvshare_eval.quality.cases import Case, Group, Prompt
from kvshare_eval.quality.tasks import Groups, register_task
from kvshare_eval.quality.tasks._shared import at_least, rng, shuffled
from kvshare_eval.quality.tasks.gsm8k import NEXT_QUESTION, few_shot


@register_task("sentences", metric="last_number", max_new_tokens=160, stop=NEXT_QUESTION)
def sentences(
    data: DataSource, seed: int, *, padding: int = 14, min_words: int = 0, shots: int = 0
) -> Groups:
    """A word problem whose sentences were each encoded alone.

    Nearly every token has a donor, and every donor saw nothing but its own sentence: the worst
    case for what attention across passages carries. A server reuses runs of at least its
    ``min_run_tokens`` equal tokens, which most sentences are shorter than: set ``min_words``.

    Args:
        data: where the problems are.
        seed: decides the order of the problems.
        padding: newlines before and after each sentence when it is encoded alone.
        min_words: neighbouring sentences are merged until they have as many words.
        shots: worked examples before the problem; their sentences are donors too.
    """
    at_least("sentences", "padding", padding, 0)
    at_least("sentences", "shots", shots, 0)
    problems = load_gsm8k(data)
    for problem in shuffled(problems, rng(seed, "sentences")):
        yield _group(problem, problems, seed, padding, min_words, shots)


def _group(
    problem: WordProblem,
    problems: tuple[WordProblem, ...],
    seed: int,
    padding: int,
    min_words: int,
    shots: int,
) -> Group:
    random_ = rng(seed, "sentences", problem.id)
    examples = [p for p in random_.sample(problems, shots + 1) if p != problem][:shots]
    parts = [part for p in examples for part in (p.question, p.worked)]
    donors = [s for part in (*parts, problem.question) for s in _merged(part, min_words)]
    frame = "\n" * padding
    case = Case(
        "0",
        few_shot(examples, problem),
        (problem.result,),
        few_shot((), problem) if examples else None,
    )
    history = tuple(Prompt(text=f"{frame}{donor}{frame}") for donor in dict.fromkeys(donors))
    return Group(problem.id, history, (case,))


def _merged(text: str, min_words: int) -> list[str]:
    """Stretches of whole sentences, as they stand in the text, of at least ``min_words``.

    What is left over at the end goes to the last stretch.
    """
    bounds: list[tuple[int, int]] = []
    start = end = 0
    for sentence in split(text):
        end = text.index(sentence, end) + len(sentence)
        if word_count(text[start:end]) >= min_words:
            bounds.append((start, end))
            start = end
    if text[start:].strip():
        bounds.append((bounds.pop()[0] if bounds else start, len(text)))
    return [text[first:last].strip() for first, last in bounds]
