"""What one request of a quality run leaves behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """How far a method's next-token distributions are from full recompute's, teacher-forced.

    Both are asked for the distribution at each of the ``m`` positions of full recompute's own
    answer. Index ``i`` is the i-th token of that answer.

    Attributes:
        kl: KL(full || method) in nats at each position, over full's most likely tokens and one
            bucket for the rest: never more than the divergence of the whole distributions.
        top1: whether the most likely token is the same.
        covered: probability that full gives to the tokens that are told apart.
    """

    kl: tuple[float, ...]
    top1: tuple[bool, ...]
    covered: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        return sum(self.kl) / len(self.kl)

    @property
    def first_divergence(self) -> int | None:
        """Index of the first token at which greedy decoding parts; ``None`` if it never does."""
        return next((i for i, same in enumerate(self.top1) if not same), None)


@dataclass(frozen=True)
class QualityRecord:
    """One case with one method.

    Attributes:
        key: ``task/group/case/method``, unique in the run.
        task, group, case: where the question comes from; ``task`` with its options.
        method: name of the method (:mod:`kvshare_eval.quality.methods`).
        settings: what the request said under ``custom_params.kvshare``.
        prompt_tokens: length of the method's prompt; ``no_context`` has one of its own.
        answer: the text; ``None`` where no answer was generated.
        same_as_full: the answer was not generated but taken over from full recompute, since every
            one of its tokens is the method's own most likely one.
        gold: accepted answers, empty where there are none.
        scores: metric -> value in [0, 1], only where there is gold and an answer.
        metric: the task's own metric.
        divergence: ``None`` for the methods ``full`` and ``no_context``.
        report: the server's counts for the prompt (``ReuseReport``), without the answer's tokens
            that a scoring request brings along.
        e2e_ms: of the request that the report is of, by the client's clock; other requests may have
            been running: not a measurement of speed.
    """

    key: str
    task: str
    group: str
    case: str
    method: str
    settings: dict[str, Any]
    prompt_tokens: int
    answer: str | None
    same_as_full: bool
    gold: tuple[str, ...]
    metric: str
    scores: dict[str, float] = field(default_factory=dict)
    divergence: Divergence | None = None
    report: dict[str, Any] = field(default_factory=dict)
    e2e_ms: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For the JSONL; :func:`from_dict` reads it back."""
        return asdict(self)


def from_dict(record: dict[str, Any]) -> QualityRecord:
    """Read what :meth:`QualityRecord.to_dict` wrote, from JSON or not."""
    values = dict(record)
    if values["divergence"] is not None:
        values["divergence"] = Divergence(**{k: tuple(v) for k, v in values["divergence"].items()})
    values["gold"] = tuple(values["gold"])
    return QualityRecord(**values)
