"""How long an answer will be, from answers that were alike, and how far to trust that (CacheOPT).

    tokens   0 ........ predicted ....... upper bound ........ max_new_tokens
                            |<-- padding -->|
             observed answers end before the upper bound in a share `confidence` of the cases

Several simple predictors are asked: the answers to the nearest prompts, those of the namespace to
prompts of about this length, those of the namespace, and all. Each is trusted by how far off it was
of late, so that drift is followed and no second model is needed. The padding is the error that a
share ``confidence`` of the recent errors stays below (a conformal quantile); with few errors it is
Hoeffding's bound over their range (arXiv 2503.13773, where a head of the model predicts).

An answer that outgrew its bound is asked about anew: of the answers that were as long as it is
already, how much longer did they get?
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

#: Answers that a predictor remembers, and errors that a bound rests on.
_REMEMBERED = 256
#: With fewer errors Hoeffding's bound takes the place of their quantile.
_ENOUGH_ERRORS = 20
#: Namespaces and lengths of which answers are kept; those seen longest ago leave.
_MOST_GROUPS = 1024
#: Share of the old error that is left after one more answer.
_FORGETTING = 0.97
#: Answer that is expected where nothing was seen, as a share of `max_new_tokens`.
_UNSEEN_SHARE = 0.5
_VERSION = 1
#: The group of all answers; no namespace is called so, see `_named`.
_ALL = "*"


@dataclass(frozen=True)
class Asked:
    """What is known of a request before its answer.

    Attributes:
        namespace: its trust domain; answers of others say nothing about it but through all
            together.
        prompt_tokens: length of the prompt.
        max_new_tokens: bound on the answer, at least 1.
        neighbours: lengths of the answers to the nearest prompts of the namespace, nearest first.
    """

    namespace: str
    prompt_tokens: int
    max_new_tokens: int
    neighbours: tuple[int, ...] = ()


@dataclass(frozen=True)
class LengthEstimate:
    """What is expected of one answer.

    Attributes:
        predicted_tokens: most likely length, 1 to ``max_new_tokens``.
        upper_tokens: the answer is expected to be no longer with ``confidence``.
        direction: ``under`` or ``over``: what predictions of this kind were of late, more often
            than not; ``even`` where neither.
        confidence: share of the answers that the upper bound is to hold for.
        opinions: what each predictor says, by its name, in tokens.
    """

    predicted_tokens: int
    upper_tokens: int
    direction: str
    confidence: float
    opinions: Mapping[str, float] = field(default_factory=dict)


def confidence_at(arrivals_per_s: float, most: float = 0.95, slope: float = 0.001) -> float:
    """CacheOPT's ``p = most / (1 + slope * arrivals)``: at a high rate less is reserved for each,
    so that more are admitted.

    Raises:
        ValueError: a rate or slope below 0, or ``most`` outside (0, 1).
    """
    if arrivals_per_s < 0 or slope < 0 or not 0 < most < 1:
        raise ValueError(
            f"arrivals_per_s={arrivals_per_s}, most={most}, slope={slope}: allowed are rates and "
            "slopes from 0 on and most between 0 and 1"
        )
    return most / (1 + slope * arrivals_per_s)


class _Last:
    """The last lengths of a group: in order of time, to forget the oldest, and of size."""

    def __init__(self) -> None:
        self.by_time: deque[int] = deque()
        self.by_size: list[int] = []

    def add(self, tokens: int) -> None:
        if len(self.by_time) == _REMEMBERED:
            del self.by_size[bisect_left(self.by_size, self.by_time.popleft())]
        self.by_time.append(tokens)
        insort(self.by_size, tokens)

    def extend(self, lengths: Iterable[int]) -> None:
        for tokens in lengths:
            self.add(tokens)


_NONE = _Last()


class LengthEstimator:
    """Learns from every answer; bounded in memory whatever comes.

    One scheduler owns it. What it says is a pure function of what it was told, in order.

    Args:
        isolated: what is said of a namespace rests on its own answers alone. Otherwise one without
            any falls back on those of all, which tells it a little about theirs.
    """

    def __init__(self, isolated: bool = False) -> None:
        self.isolated = isolated
        self._answers: OrderedDict[str, _Last] = OrderedDict()
        #: Mean absolute error of each predictor, of logarithms.
        self._off: OrderedDict[str, float] = OrderedDict()
        self._errors: OrderedDict[str, _Last] = OrderedDict()

    def estimate(self, asked: Asked, confidence: float) -> LengthEstimate:
        """
        Args:
            confidence: between 0 and 1, both left out.

        Raises:
            ValueError: another confidence, or ``max_new_tokens`` below 1.
        """
        _check(asked, confidence)
        opinions = self._opinions(asked)
        predicted = self._agreed(opinions, asked)
        errors = self._errors_of(asked)
        padding = _padding(errors, confidence, asked.max_new_tokens)
        upper = min(asked.max_new_tokens, max(1, predicted + padding))
        return LengthEstimate(predicted, upper, _direction(errors), confidence, opinions)

    def observe(self, asked: Asked, estimate: LengthEstimate, answer_tokens: int) -> None:
        """An answer is complete.

        Args:
            estimate: what was said of it before.
            answer_tokens: its length. One that was aborted tells nothing and is not observed.
        """
        for name, opinion in estimate.opinions.items():
            off = abs(math.log((answer_tokens + 1) / (opinion + 1)))
            key = self._judged(name, asked)
            before = self._off.get(key)
            self._off[key] = (
                off if before is None else _FORGETTING * before + (1 - _FORGETTING) * off
            )
            self._off.move_to_end(key)
        while len(self._off) > _MOST_GROUPS:
            self._off.popitem(last=False)
        for group in self._groups(asked).values():
            _kept(self._answers, group).add(answer_tokens)
            _kept(self._errors, group).add(answer_tokens - estimate.predicted_tokens)

    def longer(self, asked: Asked, so_far_tokens: int, confidence: float) -> int:
        """Upper bound of a whole answer that has ``so_far_tokens`` already and goes on.

        Of the answers that were as long, a share ``confidence`` ended before it.

        Raises:
            ValueError: as :meth:`estimate`.
        """
        _check(asked, confidence)
        most_more = asked.max_new_tokens - so_far_tokens
        if most_more <= 1:
            return max(so_far_tokens, asked.max_new_tokens)
        more: list[int] = []
        for group in self._groups(asked).values():
            answers = self._answers.get(group, _NONE).by_size
            more = [
                tokens - so_far_tokens for tokens in answers[bisect_right(answers, so_far_tokens) :]
            ]
            if len(more) >= _ENOUGH_ERRORS:
                break
        return so_far_tokens + min(most_more, max(1, _padding(more, confidence, most_more)))

    def forget(self, namespaces: Collection[str]) -> None:
        """Nothing of ``namespaces`` is remembered any more; nor is what all together have said,
        from which theirs cannot be told apart."""
        names = {_named(namespace) for namespace in namespaces}
        for groups in (self._answers, self._errors):
            # The lengths in names keep one from beginning like another.
            for group in [g for g in groups if g == _ALL or g.rpartition(";")[0] in names]:
                del groups[group]
            for name in names:
                groups.pop(name, None)
        for key in [k for k in self._off if not self.isolated or k.partition(";")[2] in names]:
            del self._off[key]

    # --- to a file and back ------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """What :meth:`from_state` reads; plain values for a JSON file of at most a few MB."""
        return {
            "version": _VERSION,
            "isolated": self.isolated,
            "answers": {group: list(told.by_time) for group, told in self._answers.items()},
            "errors": {group: list(told.by_time) for group, told in self._errors.items()},
            "off": dict(self._off),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, isolated: bool | None = None
    ) -> LengthEstimator:
        """
        Args:
            isolated: as in the constructor; ``None`` for what it was.

        Raises:
            ValueError: of another version or another shape; the caller begins anew.
        """
        made = cls(state.get("isolated") is True if isolated is None else isolated)
        try:
            if state["version"] != _VERSION:
                raise ValueError(f"version {state['version']}, expected {_VERSION}")
            for kept, name in ((made._answers, "answers"), (made._errors, "errors")):
                for group, told in state[name].items():
                    _kept(kept, str(group)).extend(int(one) for one in told)
            made._off.update((str(name), float(off)) for name, off in state["off"].items())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no state of a length estimator: {error!r}") from error
        return made

    # --- details -----------------------------------------------------------------------------

    def _opinions(self, asked: Asked) -> dict[str, float]:
        """In tokens; at most ``max_new_tokens``."""
        told: dict[str, float] = {}
        if asked.neighbours:
            told["neighbours"] = float(median(asked.neighbours))
        for name, group in self._groups(asked).items():
            answers = self._answers.get(group, _NONE).by_size
            if answers:
                told[name] = _middle(answers)
        most = float(asked.max_new_tokens)
        return {name: min(most, tokens) for name, tokens in told.items()}

    def _agreed(self, opinions: Mapping[str, float], asked: Asked) -> int:
        """The mean of the logarithms, each weighted by how close it was of late."""
        most = asked.max_new_tokens
        if not opinions:
            return max(1, round(most * _UNSEEN_SHARE))
        total = weights = 0.0
        for name, tokens in opinions.items():
            # Squared, so that a predictor that is twice as far off counts for a quarter.
            weight = 1 / (self._off.get(self._judged(name, asked), 1.0) + 0.05) ** 2
            total += weight * math.log(tokens + 1)
            weights += weight
        return min(most, max(1, round(math.exp(total / weights) - 1)))

    def _errors_of(self, asked: Asked) -> Sequence[int]:
        """Of the narrowest group that has enough of them; sorted."""
        found: Sequence[int] = ()
        for group in self._groups(asked).values():
            found = self._errors.get(group, _NONE).by_size
            if len(found) >= _ENOUGH_ERRORS:
                break
        return found

    def _groups(self, asked: Asked) -> dict[str, str]:
        """Groups whose answers say something about it, the narrowest first."""
        name = _named(asked.namespace)
        groups = {
            "alike": f"{name};{max(asked.prompt_tokens, 1).bit_length()}",
            "namespace": name,
        }
        return groups if self.isolated else groups | {"all": _ALL}

    def _judged(self, predictor: str, asked: Asked) -> str:
        """Whose record a predictor is trusted by."""
        return f"{predictor};{_named(asked.namespace)}" if self.isolated else predictor


def _named(namespace: str) -> str:
    """With its length, so that no name looks like another's group."""
    return f"{len(namespace)}:{namespace}"


def _check(asked: Asked, confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: allowed are values between 0 and 1")
    if asked.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={asked.max_new_tokens}: the least is 1")


def _kept(groups: OrderedDict[str, _Last], group: str) -> _Last:
    told = groups.setdefault(group, _Last())
    groups.move_to_end(group)
    while len(groups) > _MOST_GROUPS:
        groups.popitem(last=False)
    return told


def _middle(lengths: Sequence[int]) -> float:
    """The median of sorted ones."""
    count = len(lengths)
    return (lengths[(count - 1) // 2] + lengths[count // 2]) / 2


def _padding(errors: Sequence[int], confidence: float, most: int) -> int:
    """Tokens to add so that a share ``confidence`` of the answers end before the sum; of sorted
    errors."""
    count = len(errors)
    rank = math.ceil((count + 1) * confidence)
    if count >= _ENOUGH_ERRORS and rank <= count:
        return errors[rank - 1]
    # P(error - mean >= t) <= exp(-2 t^2 / range^2), one-sided.
    mean, spread = (sum(errors) / count, errors[-1] - errors[0]) if count >= 2 else (0, 2 * most)
    return math.ceil(mean + spread * math.sqrt(math.log(1 / (1 - confidence)) / 2))


def _direction(errors: Sequence[int]) -> str:
    """Of sorted errors."""
    over, under = bisect_left(errors, 0), len(errors) - bisect_right(errors, 0)
    if under == over:
        return "even"
    return "under" if under > over else "over"


@dataclass(frozen=True)
class Coverage:
    """Answers that were promised an upper bound with about one confidence.

    Attributes:
        promised: mean of the confidences.
        observed: share of the answers that were no longer than their bound.
        answers: so many.
        padding: mean of the bounds over the mean of the answers: what the promise costs.
    """

    promised: float
    observed: float
    answers: int
    padding: float


class Calibration:
    """Promised against observed coverage, by confidence in steps of a twentieth."""

    _STEPS = 20

    def __init__(self) -> None:
        #: Answers, of these covered, sums of confidences, of bounds and of lengths.
        self._sums = [[0.0] * 5 for _ in range(self._STEPS + 1)]

    def observe(self, estimate: LengthEstimate, answer_tokens: int) -> None:
        """An answer is complete."""
        upper = estimate.upper_tokens
        more = 1, answer_tokens <= upper, estimate.confidence, upper, answer_tokens
        sums = self._sums[round(estimate.confidence * self._STEPS)]
        sums[:] = (have + one for have, one in zip(sums, more, strict=True))

    def report(self) -> list[Coverage]:
        """One entry for each confidence that was promised, the least first."""
        return [
            Coverage(promised / count, covered / count, int(count), bounds / max(lengths, 1.0))
            for count, covered, promised, bounds, lengths in self._sums
            if count
        ]
