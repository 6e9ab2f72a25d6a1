"""How good an answer is, and how far one next-token distribution is from another.

An answer is judged against accepted answers, the best of which counts; every score lies in [0, 1].
Packages are imported when they are first needed: they bring torch along, which takes seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from kvshare_eval.quality.record import Divergence

#: Probabilities come from log-probabilities in fp32, and the rest bucket is one minus their sum:
#: what is smaller than this is rounding.
REST_FLOOR = 1e-7

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]%])(?P<sign>[-−+]))?"  # "3-5" is a range: its minus belongs to no number
    r"[$£€]?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARKED = re.compile(r"####(?P<rest>[^\n]*)")


def score(metric: str, answer: str, gold: Sequence[str], first_line: bool = False) -> float:
    """Judge one answer.

    Args:
        metric: one of :func:`metric_names`.
        answer: what the model said.
        gold: accepted answers; the best counts, except for ``found_share``, which wants them all.
        first_line: only the first line that is not empty is judged.

    Raises:
        ValueError: unknown metric, no gold, or gold without a number for ``last_number``.
    """
    if metric not in _METRICS:
        raise ValueError(f"metric={metric!r}: allowed are {', '.join(_METRICS)}")
    if not gold:
        raise ValueError(f"metric {metric} needs at least one accepted answer")
    return _METRICS[metric](judged_part(answer, first_line), gold)


def all_scores(answer: str, gold: Sequence[str], first_line: bool = False) -> dict[str, float]:
    """Every metric that the gold allows: none without gold, ``last_number`` only with numbers."""
    if not gold:
        return {}
    text = judged_part(answer, first_line)
    numbers = any(_last_number(accepted) is not None for accepted in gold)
    return {
        name: judge(text, gold)
        for name, judge in _METRICS.items()
        if numbers or name != "last_number"
    }


def metric_names() -> tuple[str, ...]:
    return tuple(_METRICS)


def judged_part(answer: str, first_line: bool) -> str:
    """The part of an answer that counts."""
    text = answer.strip()
    return text.splitlines()[0].rstrip() if first_line and text else text


def divergence(
    full: Sequence[Mapping[Any, float]],
    method: Sequence[Mapping[Any, float]],
    *,
    full_top1: Sequence[Hashable],
    method_top1: Sequence[Hashable],
) -> Divergence:
    """Compare two models of the same answer, position by position.

    The tokens that ``full`` tells are kept apart, all others share one bucket. Merging outcomes
    never raises a divergence, so each figure is a lower bound of the whole one, and equal to it
    where ``full`` tells every token.

    Args:
        full: for each position, log-probabilities of full recompute's most likely tokens.
        method: for each position, log-probabilities of at least the same tokens.
        full_top1: for each position, the most likely token.
        method_top1: the same for the method.

    Raises:
        ValueError: the lengths differ, a position tells no token, or ``method`` does not tell a
            token that ``full`` tells; the message names position and token.
    """
    lengths = {len(full), len(method), len(full_top1), len(method_top1)}
    if len(lengths) != 1 or not full:
        raise ValueError(f"all four need the same number of positions, at least 1: got {lengths}")
    pairs = [_position(index, f, m) for index, (f, m) in enumerate(zip(full, method, strict=True))]
    return Divergence(
        kl=tuple(kl for kl, _ in pairs),
        top1=tuple(f == m for f, m in zip(full_top1, method_top1, strict=True)),
        covered=tuple(covered for _, covered in pairs),
    )


def _position(
    index: int, full: Mapping[Hashable, float], method: Mapping[Hashable, float]
) -> tuple[float, float]:
    """KL in nats, and the probability of the tokens that are told apart."""
    if not full:
        raise ValueError(f"position {index}: full tells no token")
    missing = [token for token in full if token not in method]
    if missing:
        raise ValueError(f"position {index}: method tells no log-probability of {missing[0]!r}")
    p = _with_rest([math.exp(value) for value in full.values()])
    q = _with_rest([math.exp(method[token]) for token in full])
    kl = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)
    return max(kl, 0.0), min(math.fsum(math.exp(value) for value in full.values()), 1.0)


def _with_rest(told: list[float]) -> list[float]:
    """A distribution over the told tokens and the rest; sums to one though its source is fp32."""
    rest = max(1.0 - math.fsum(told), REST_FLOOR)
    # Told tokens may underflow to 0, which would make the divergence infinite.
    parts = [*(max(value, 1e-300) for value in told), rest]
    total = math.fsum(parts)
    return [part / total for part in parts]


# --- the metrics ----------------------------------------------------------------------------------


@cache
def _squad() -> Any:
    """The SQuAD script as Transformers keeps it.

    torchmetrics has the same arithmetic, but its import takes twice as long, and a process that
    runs an evaluation has loaded Transformers already, for the tokenizer. A call takes 0.06 ms.
    """
    from transformers.data.metrics import squad_metrics

    return squad_metrics


@cache
def _rouge() -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)


def _f1(answer: str, gold: Sequence[str]) -> float:
    return max(float(_squad().compute_f1(accepted, answer)) for accepted in gold)


def _exact_match(answer: str, gold: Sequence[str]) -> float:
    return max(float(_squad().compute_exact(accepted, answer)) for accepted in gold)


def _rouge_l(answer: str, gold: Sequence[str]) -> float:
    return max(float(_rouge().score(accepted, answer)["rougeL"].fmeasure) for accepted in gold)


def _contains(answer: str, gold: Sequence[str]) -> float:
    return max(map(float, _found(answer, gold)))


def _avoids(answer: str, gold: Sequence[str]) -> float:
    """For what an answer must not say."""
    return 1.0 - _contains(answer, gold)


def _found_share(answer: str, gold: Sequence[str]) -> float:
    return sum(_found(answer, gold)) / len(gold)


def _found(answer: str, gold: Sequence[str]) -> list[bool]:
    """Whether each gold answer stands in the answer, as whole words: "7" is not in "1976"."""
    normalise = _squad().normalize_answer
    text = f" {normalise(answer)} "
    wanted = [normalise(accepted) for accepted in gold]
    # Gold that is nothing but articles and punctuation is looked for as it is written.
    return [
        f" {short} " in text if short else accepted.strip() == answer.strip()
        for accepted, short in zip(gold, wanted, strict=True)
    ]


def _number_matches(answer: str, gold: Sequence[str]) -> float:
    wanted = {_last_number(accepted) for accepted in gold} - {None}
    if not wanted:
        raise ValueError(f"metric last_number: no number in the accepted answers {list(gold)!r}")
    return float(_last_number(answer) in wanted)


def _last_number(text: str) -> Decimal | None:
    """GSM8K's answer: behind the first ``####`` if it is there, else the last number.

    The first, since a model that goes on after its answer makes up further questions.
    """
    marked = _MARKED.search(text)
    if marked and (found := _NUMBER.search(marked["rest"])):
        return _value(found)
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    return None if last is None else _value(last)


def _value(found: re.Match[str]) -> Decimal:
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] in ("-", "−") else value


_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1": _f1,
    "exact_match": _exact_match,
    "rouge_l": _rouge_l,
    "contains": _contains,
    "avoids": _avoids,
    "last_number": _number_matches,
    "found_share": _found_share,
}
