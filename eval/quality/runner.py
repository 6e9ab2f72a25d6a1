"""One quality run: history, then every case with every method, records as they come.

for each group       history, one request after the other
  for each case      full and no_context  ->  score full's answer with every other method
                                          ->  generate where a method's answer will differ
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvshare_eval.asking import Answered, Asker, Scored
from kvshare_eval.errors import EvalError
from kvshare_eval.metrics import all_scores, divergence
from kvshare_eval.quality.cases import Case, Group
from kvshare_eval.quality.methods import HISTORY_SETTINGS, NO_CONTEXT, Method
from kvshare_eval.quality.record import Divergence, QualityRecord
from kvshare_eval.quality.tasks import Task
from kvshare_eval.rendering import Renderer
from kvshare_eval.run_dir import RunDir

#: Groups that are served at the same time: while one decodes the other prefills.
GROUPS_AT_ONCE = 2


@dataclass(frozen=True)
class Depth:
    """``top``: tokens that are told apart at each position; ``positions``: of an answer."""

    top: int = 20
    positions: int = 32


@dataclass(frozen=True)
class Part:
    """One task of a run.

    Attributes:
        label: the task with its options, as the command line gave it.
        task: what the label says.
        groups: with all the cases that are measured.
        answers: generate answers and judge them; without it only divergence is measured.

    Raises:
        EvalError: no case at all, or two of one name.
    """

    label: str
    task: Task
    groups: tuple[Group, ...]
    answers: bool

    def __post_init__(self) -> None:
        names = [f"{group.id}/{case.id}" for group in self.groups for case in group.cases]
        if not names:
            raise EvalError(f"task {self.label}: the data at hand give no case")
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise EvalError(f"task {self.label}: two cases are called {twice!r}")

    @property
    def cases(self) -> int:
        return sum(len(group.cases) for group in self.groups)

    def answer_tokens(self, depth: Depth) -> int:
        """The longest answer of full recompute: no more than is looked at."""
        longest: int = self.task.max_new_tokens
        return longest if self.answers else min(longest, depth.positions)

    @property
    def has_gold(self) -> bool:
        return self.answers and any(c.answers for group in self.groups for c in group.cases)


class QualityRun:
    """Asks everything that is not in the run directory yet.

    Args:
        asker: an open client of the server.
        renderer: of the served model.
        run: an open run directory.
        methods: see :func:`kvshare_eval.quality.methods.parse_methods`; ``full`` is the first.
        depth: how closely distributions are looked at.
        keep_gold: write the accepted answers into the records; they are the data set's.
        done: called with the label of a part after each case that was asked.
    """

    def __init__(
        self,
        asker: Asker,
        renderer: Renderer,
        run: RunDir,
        methods: Sequence[Method],
        *,
        depth: Depth,
        keep_gold: bool,
        done: Callable[[str], None],
    ) -> None:
        self._keep_gold = keep_gold
        self._asker = asker
        self._renderer = renderer
        self._run = run
        self._methods = tuple(methods)
        self._depth = depth
        self._done = done
        # A server may still hold what an earlier start of this run left there.
        self._salt = uuid.uuid4().hex

    def finished(self, part: Part) -> int:
        """Cases that the run directory holds with every method."""
        return sum(
            self._is_done(part, group, case) for group in part.groups for case in group.cases
        )

    async def part(self, part: Part) -> None:
        """Measure the cases of one part."""
        waiting = iter(part.groups)

        async def worker() -> None:
            for group in waiting:
                await self._group(part, group)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(GROUPS_AT_ONCE):
                tasks.create_task(worker())

    async def _group(self, part: Part, group: Group) -> None:
        open_cases = [case for case in group.cases if not self._is_done(part, group, case)]
        if not open_cases:
            return
        salt = f"kvshare-eval:{self._salt}:{part.label}:{group.id}"
        for prompt in group.history:
            await self._asker.generate(
                self._renderer.ids(prompt), max_new_tokens=1, salt=salt, settings=HISTORY_SETTINGS
            )
        async with asyncio.TaskGroup() as tasks:
            for case in open_cases:
                tasks.create_task(self._case(part, group, case, salt))

    def _methods_of(self, part: Part, case: Case) -> list[Method]:
        floor = part.answers and case.no_context is not None
        return [method for method in self._methods if method.name != NO_CONTEXT or floor]

    def _is_done(self, part: Part, group: Group, case: Case) -> bool:
        keys = (_key(part, group, case, method) for method in self._methods_of(part, case))
        return all(key in self._run.done for key in keys)

    async def _case(self, part: Part, group: Group, case: Case, salt: str) -> None:
        ids = self._renderer.ids(case.prompt)
        made = _Maker(part, group, case, self._keep_gold)
        full_method, *others = self._methods_of(part, case)
        # Full recompute is asked for again when a case is resumed: its distributions are not kept.
        full = await self._asker.generate(
            ids,
            max_new_tokens=part.answer_tokens(self._depth),
            salt=salt,
            settings=full_method.settings,
            top=self._depth.top,
            stop=part.task.stop,
        )
        if not full.ids or not full.top:
            raise EvalError(f"{made.key(full_method)}: the server told no token of an answer")
        answer = full.text if part.answers else None
        self._write(made.record(full_method, full, len(ids), answer=answer))
        async with asyncio.TaskGroup() as tasks:
            for method in others:
                tasks.create_task(self._method(made, method, ids, full, salt))
        self._done(part.label)

    async def _method(
        self, made: _Maker, method: Method, ids: list[int], full: Answered, salt: str
    ) -> None:
        if made.key(method) in self._run.done:
            return
        if method.name == NO_CONTEXT:
            await self._no_context(made, method, salt)
            return
        scored, apart = await self._score(method, ids, full, salt)
        answer, same = None, False
        if made.part.answers:
            same = apart.first_divergence is None and len(apart.kl) == len(full.ids)
            answer = full.text if same else (await self._answer(made, method, ids, salt)).text
        self._write(made.record(method, scored, len(ids), answer=answer, same=same, apart=apart))

    async def _no_context(self, made: _Maker, method: Method, salt: str) -> None:
        assert made.case.no_context is not None
        ids = self._renderer.ids(made.case.no_context)
        answered = await self._answer(made, method, ids, salt)
        self._write(made.record(method, answered, len(ids), answer=answered.text))

    async def _answer(self, made: _Maker, method: Method, ids: list[int], salt: str) -> Answered:
        return await self._asker.generate(
            ids,
            max_new_tokens=made.part.task.max_new_tokens,
            salt=salt,
            settings=method.settings,
            stop=made.part.task.stop,
        )

    async def _score(
        self, method: Method, ids: list[int], full: Answered, salt: str
    ) -> tuple[Scored, Divergence]:
        """Teacher forcing over full recompute's own answer."""
        count = min(len(full.ids), len(full.top), self._depth.positions)
        tops, answer = full.top[:count], full.ids[:count]
        wanted = sorted({token for top in tops for token in top})
        scored = await self._asker.score(ids, answer, wanted, salt=salt, settings=method.settings)
        # What full chose, and not the first of its most likely: two may be equally likely.
        apart = divergence(tops, scored.wanted, full_top1=answer, method_top1=scored.best)
        return scored, apart

    def _write(self, record: QualityRecord) -> None:
        if record.key not in self._run.done:
            self._run.append(record.to_dict())


@dataclass(frozen=True)
class _Maker:
    """Makes the records of one case."""

    part: Part
    group: Group
    case: Case
    keep_gold: bool

    def key(self, method: Method) -> str:
        return _key(self.part, self.group, self.case, method)

    def record(
        self,
        method: Method,
        outcome: Answered | Scored,
        prompt_tokens: int,
        *,
        answer: str | None,
        same: bool = False,
        apart: Divergence | None = None,
    ) -> QualityRecord:
        task, gold = self.part.task, self.case.answers
        judged = answer is not None and gold
        return QualityRecord(
            key=self.key(method),
            task=self.part.label,
            group=self.group.id,
            case=self.case.id,
            method=method.name,
            settings=dict(method.settings),
            prompt_tokens=prompt_tokens,
            answer=answer,
            same_as_full=same,
            gold=gold if self.keep_gold else (),
            metric=task.metric,
            scores=all_scores(answer or "", gold, first_line=task.first_line) if judged else {},
            divergence=apart,
            report=dict(outcome.report),
            e2e_ms=outcome.e2e_ms,
        )


def _key(part: Part, group: Group, case: Case, method: Method) -> str:
    return f"{part.label}/{group.id}/{case.id}/{method.name}"


def take_cases(groups: Iterable[Group], cases: int) -> Iterator[Group]:
    """The first groups with so many cases in all; the last one is cut if need be."""
    left = cases
    for group in groups:
        if left <= 0:
            return
        kept = group.cases[:left]
        left -= len(kept)
        yield Group(group.id, group.history, kept)
