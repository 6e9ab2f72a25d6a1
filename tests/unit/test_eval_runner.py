"""A quality run on a toy model: every record worked out again, and every way to stop it."""

import asyncio
import json
import math
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from quality_stub import PIECES, Toy, ToyServer

from kvshare_eval.asking import Asker
from kvshare_eval.errors import EvalError
from kvshare_eval.metrics import all_scores
from kvshare_eval.quality.cases import Case, Group, Prompt
from kvshare_eval.quality.methods import HISTORY_SETTINGS, Method, default_methods, parse_methods
from kvshare_eval.quality.record import QualityRecord, from_dict
from kvshare_eval.quality.runner import Depth, Part, QualityRun, take_cases
from kvshare_eval.quality.tasks import Task
from kvshare_eval.rendering import Renderer
from kvshare_eval.run_dir import RunDir, load_run

pytestmark = pytest.mark.unit

METHODS = parse_methods(["no_context", "exact_prefix", "none", "seams@0.5", "seams@1"])


class Words:
    """A tokenizer for which every word is a token; its number does not depend on what was asked
    first, for prompts are rendered in the order in which requests happen to end."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [100 + zlib.crc32(word.encode()) for word in text.split()]


def task(longest: int, stop: tuple[str, ...] = ()) -> Task:
    return Task("toy", lambda: iter(()), "f1", longest, False, stop, "a toy")


def groups(count: int = 2, cases: int = 2, *, context: bool = True) -> tuple[Group, ...]:
    """The case shares its middle with the history, and not its beginning."""
    made = []
    for g in range(count):
        shared = " ".join(f"shared{g}-{i}" for i in range(6))
        made.append(
            Group(
                f"g{g}",
                tuple(Prompt(text=f"before{g} {n} {shared}") for n in range(2)),
                tuple(
                    Case(
                        f"c/{c}",
                        Prompt(text=f"order{c} {shared} question{g}-{c}"),
                        ("blue", "the 12") if c % 2 == 0 else (),
                        Prompt(text=f"question{g}-{c}") if context else None,
                    )
                    for c in range(cases)
                ),
            )
        )
    return tuple(made)


@dataclass
class Bench:
    """Runs parts against the stub, and keeps the tokenizer that says what was asked."""

    server: ToyServer
    path: Path
    methods: Sequence[Method] = METHODS
    depth: Depth = field(default_factory=lambda: Depth(4, 32))
    concurrency: int = 8
    keep_gold: bool = True

    def __post_init__(self) -> None:
        self.words = Words()
        self.done: list[str] = []

    def ids(self, prompt: Prompt) -> list[int]:
        return self.words.encode(prompt.text)

    def run(self, part: Part, *, resume: bool = False, kind: type[RunDir] = RunDir) -> None:
        async def measure(run: RunDir) -> None:
            async with Asker(self.server.url, concurrency=self.concurrency) as asker:
                await QualityRun(
                    asker,
                    Renderer(self.words),
                    run,
                    self.methods,
                    depth=self.depth,
                    keep_gold=self.keep_gold,
                    done=self.done.append,
                ).part(part)

        with kind(self.path, kind="quality", command="x", settings={}, resume=resume) as run:
            asyncio.run(measure(run))

    def records(self) -> dict[str, QualityRecord]:
        return {record["key"]: from_dict(record) for record in load_run(self.path).records}


@pytest.fixture(scope="module")
def server() -> Iterator[ToyServer]:
    with ToyServer() as running:
        yield running


@pytest.fixture
def bench(server: ToyServer, tmp_path: Path) -> Bench:
    fresh(server, Toy())
    return Bench(server, tmp_path / "run")


def fresh(server: ToyServer, toy: Toy) -> None:
    server.toy, server.lives, server.delay_s, server.most_in_flight = toy, None, 0.0, 0
    server.bodies.clear()
    server.published.clear()


# --- worked out again -----------------------------------------------------------------------------


def check(bench: Bench, part: Part, record: QualityRecord, group: Group, case: Case) -> None:
    """Everything that one record says, from the toy alone."""
    toy, longest, stop = bench.server.toy, part.task.max_new_tokens, part.task.stop
    prompt = case.no_context if record.method == "no_context" else case.prompt
    assert prompt is not None
    ids = bench.ids(prompt)
    disturbed = {"none": 1.0, "seams@0.5": 0.5}.get(record.method, 0.0)
    if not part.answers:
        longest = min(longest, bench.depth.positions)
    full_ids, _ = toy.greedy(bench.ids(case.prompt), longest, stop)
    own_ids, own_text = toy.greedy(ids, longest, stop, disturbed)
    compared = record.method not in ("full", "no_context")
    seen = full_ids[: bench.depth.positions]
    assert record.prompt_tokens == len(ids)
    assert record.settings == dict(next(m for m in METHODS if m.name == record.method).settings)
    assert record.answer == (own_text if part.answers else None)
    assert record.same_as_full == (
        part.answers and compared and own_ids == full_ids and len(full_ids) == len(seen)
    )
    assert record.scores == (all_scores(own_text, case.answers) if part.answers else {})
    assert bool(record.scores) == bool(part.answers and case.answers)
    assert record.metric == "f1"
    assert record.gold == (case.answers if bench.keep_gold else ())
    counts = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
    assert sum(record.report[count] for count in counts) == len(ids)
    assert (record.report["reused_tokens"] > 0) == (disturbed > 0)
    if not compared:
        assert record.divergence is None
        return
    assert record.divergence is not None
    assert len(record.divergence.kl) == len(seen)
    for i, kl in enumerate(record.divergence.kl):
        before = [*bench.ids(case.prompt), *seen[:i]]
        p, q = toy.logprobs(before), toy.logprobs(before, disturbed)
        told = sorted(range(len(p)), key=lambda token: -p[token])[: bench.depth.top]
        ps, qs = [[math.exp(x[token]) for token in told] for x in (p, q)]
        ps, qs = [[*x, max(1 - sum(x), 1e-7)] for x in (ps, qs)]
        expected = sum(a * math.log(a / b) for a, b in zip(ps, qs, strict=True))
        assert kl == pytest.approx(expected, abs=1e-6)
        assert record.divergence.covered[i] == pytest.approx(sum(ps[:-1]), abs=1e-6)
        assert record.divergence.top1[i] == (q.index(max(q)) == seen[i])
    if not disturbed:
        assert record.divergence.mean_kl < 1e-9


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    end=st.sampled_from([-5.0, 1.0, 5.0, 100.0]),
    shift=st.sampled_from([0.2, 1.5]),
    longest=st.integers(1, 7),
    stop=st.sampled_from([(), ("\n", " the")]),
    depth=st.builds(Depth, st.integers(1, len(PIECES)), st.integers(1, 9)),
    answers=st.booleans(),
    context=st.booleans(),
)
# An answer that goes on where nobody compares it any more, and one that ends at once.
@example(
    seed=0, end=-5.0, shift=0.2, longest=5, stop=(), depth=Depth(4, 2), answers=True, context=True
)
@example(
    seed=1, end=99.0, shift=0.2, longest=5, stop=(), depth=Depth(4, 2), answers=True, context=False
)
def test_every_record_is_what_the_model_gives(
    server: ToyServer,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    end: float,
    shift: float,
    longest: int,
    stop: tuple[str, ...],
    depth: Depth,
    answers: bool,
    context: bool,
) -> None:
    fresh(server, Toy(seed, end, shift))
    bench = Bench(server, tmp_path_factory.mktemp("run"), depth=depth, keep_gold=seed % 2 == 0)
    part = Part("toy:a=1", task(longest, stop), groups(context=context), answers)
    bench.run(part)
    records = bench.records()
    lines = (bench.path / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(records)  # no key twice
    for group in part.groups:
        for case in group.cases:
            for method in METHODS:
                key = f"toy:a=1/{group.id}/{case.id}/{method.name}"
                if method.name == "no_context" and not (answers and context):
                    assert key not in records
                    continue
                record = records.pop(key)
                assert (record.task, record.group) == ("toy:a=1", group.id)
                assert (record.case, record.method) == (case.id, method.name)
                check(bench, part, record, group, case)
    assert not records
    assert bench.done == ["toy:a=1"] * 4


def test_both_outcomes_of_the_shortcut_occur(bench: Bench) -> None:
    """Else the test above would not see a method whose answer is taken over, or is not."""
    found: Counter[tuple[str, bool]] = Counter()
    for seed in range(3):
        fresh(bench.server, Toy(seed, shift=0.6))
        bench.path = bench.path.with_name(f"run{seed}")
        bench.run(Part("toy", task(4), groups(), True))
        records = bench.records().values()
        found += Counter((r.method, r.same_as_full) for r in records)
        for record in records:
            if record.method == "none":
                assert record.divergence is not None
                assert record.divergence.mean_kl > 1e-3
    assert found["none", True]
    assert found["none", False]
    assert found["exact_prefix", True] == found["seams@1", True] == 3 * 4


def test_a_tie_is_held_against_what_full_chose(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens may be equally likely: the first of a list need not be what was said."""
    monkeypatch.setattr(Toy, "logprobs", lambda *given: [math.log(1 / len(PIECES))] * len(PIECES))
    monkeypatch.setattr(Toy, "greedy", lambda *given: ([3, 4], " the river"))
    bench.depth = Depth(len(PIECES), 9)
    bench.run(Part("toy", task(2), groups(1, 1), True))
    same = {r.method: r.divergence.top1 for r in bench.records().values() if r.divergence}
    # The list's first token is 0 for every method, full said 3 and 4.
    assert set(same.values()) == {(False, False)}
    assert not any(record.same_as_full for record in bench.records().values())


def test_what_is_asked_in_which_namespace(bench: Bench) -> None:
    part = Part("toy", task(3), groups(3, 2), True)
    bench.run(part)
    by_salt: dict[str, list[dict[str, Any]]] = {}
    for body in bench.server.bodies:
        by_salt.setdefault(body["cache_salt"], []).append(body)
    assert len(by_salt) == 3
    for group in part.groups:
        (asked,) = [
            bodies
            for bodies in by_salt.values()
            if bodies[0]["input_ids"] == bench.ids(group.history[0])
        ]
        kvshare = [body["sampling_params"]["custom_params"]["kvshare"] for body in asked]
        # The history first, one after the other, published; nothing else ever is.
        assert [body["input_ids"] for body in asked[:2]] == [bench.ids(p) for p in group.history]
        assert kvshare[:2] == [dict(HISTORY_SETTINGS)] * 2
        assert {each["publish"] for each in kvshare[2:]} == {False}
        assert bench.server.published[asked[0]["cache_salt"]] == [
            bench.ids(prompt) for prompt in group.history
        ]
        alone = {tuple(bench.ids(c.no_context)) for c in group.cases if c.no_context}
        assert alone == {tuple(b["input_ids"]) for b in asked if len(b["input_ids"]) == 1}
    # Another start is in namespaces of its own: what is there from this one is not met.
    bench.path = bench.path.with_name("again")
    before = set(by_salt)
    bench.run(part)
    assert len({body["cache_salt"] for body in bench.server.bodies} - before) == 3


# --- stopped and resumed --------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stopping_after(records: int, *, torn: bool) -> type[RunDir]:
    """A run directory that stops the run, in the middle of the next line if ``torn``."""

    class Stopping(RunDir):
        left = records

        def append(self, record: Any) -> None:
            if self.left == 0:
                if torn:
                    assert self._file is not None
                    self._file.write(json.dumps(dict(record))[: 40 + records])
                raise Stopped
            self.left -= 1
            super().append(record)

    return Stopping


def plain(records: dict[str, QualityRecord]) -> dict[str, dict[str, Any]]:
    return {key: {**record.to_dict(), "e2e_ms": None} for key, record in records.items()}


@pytest.mark.parametrize("answers", [True, False])
def test_stopped_anywhere_it_goes_on_as_if_nothing_had_happened(
    server: ToyServer, tmp_path: Path, answers: bool
) -> None:
    methods = parse_methods(["no_context", "none", "seams@0.5"])
    part = Part("toy", task(3), groups(2, 2), answers)
    fresh(server, Toy(3, shift=0.7))
    whole = Bench(server, tmp_path / "whole", methods)
    whole.run(part)
    expected = plain(whole.records())
    assert len(expected) == 4 * (4 if answers else 3)
    for stop in range(0, len(expected), 2 if answers else 5):
        fresh(server, server.toy)
        bench = Bench(server, tmp_path / str(stop), methods)
        with pytest.raises(ExceptionGroup) as caught:
            bench.run(part, kind=stopping_after(stop, torn=stop % 4 != 0))
        assert caught.group_contains(Stopped)
        before = bench.records()
        assert len(before) == stop
        server.bodies.clear()
        bench.done.clear()
        bench.run(part, resume=True)
        assert plain(bench.records()) == expected
        lines = (bench.path / "records.jsonl").read_text().splitlines()
        assert len(lines) == len(expected)
        # Exactly what is missing is asked, and full where anything of its case is.
        wanted = Counter[str]()
        open_cases = 0
        for group in part.groups:
            touched = False
            for case in group.cases:
                keys = {m.name: f"toy/{group.id}/{case.id}/{m.name}" for m in methods}
                missing = [m for m, key in keys.items() if key in expected and key not in before]
                open_cases += bool(missing)
                touched |= bool(missing)
                wanted.update({*missing, "full"} if missing else ())
                wanted["generated"] += sum(
                    answers and not expected[keys[m]]["same_as_full"]
                    for m in missing
                    if m in ("none", "seams@0.5")
                )
            wanted["history"] += 2 * touched
        # What the first start had sent may come in late.
        start = server.bodies[-1]["cache_salt"].split(":")[1]
        assert sum(start in body["cache_salt"] for body in server.bodies) == wanted.total()
        assert len(bench.done) == open_cases
        server.bodies.clear()
        bench.run(part, resume=True)
        assert server.bodies == []


def test_a_server_that_dies(bench: Bench) -> None:
    part = Part("toy", task(3), groups(2, 3), True)
    bench.server.lives = 15
    with pytest.raises(ExceptionGroup) as caught:
        bench.run(part)
    assert caught.group_contains(EvalError, match="no answer from")
    bench.server.lives = None
    bench.run(part, resume=True)
    assert len(bench.records()) == 6 * len(METHODS)


# --- at once --------------------------------------------------------------------------------------


def test_cases_are_asked_at_once_and_not_more_than_allowed(bench: Bench) -> None:
    part = Part("toy", task(1), groups(2, 3, context=False), False)
    bench.server.delay_s = 0.03
    seconds = {}
    for limit in (1, 6):
        bench.path, bench.concurrency = bench.path.with_name(str(limit)), limit
        bench.server.bodies.clear()
        bench.server.most_in_flight = 0
        began = time.perf_counter()
        bench.run(part)
        seconds[limit] = time.perf_counter() - began
        assert bench.server.most_in_flight == limit
        assert len(bench.server.bodies) == 2 * 2 + 6 * 5
    alone = 34 * bench.server.delay_s
    assert seconds[1] > alone
    assert seconds[6] < 0.8 * alone


# --- parts and methods ----------------------------------------------------------------------------


def test_cutting_leaves_what_comes_before_as_it_is() -> None:
    whole = groups(3, 4)
    for count in range(1, 14):
        taken = list(take_cases(iter(whole), count))
        cases = [(group.id, case) for group in taken for case in group.cases]
        assert cases == [(g.id, case) for g in whole for case in g.cases][:count]
        assert [group.history for group in taken] == [g.history for g in whole[: len(taken)]]
        assert all(group.cases for group in taken)

    def endless() -> Iterator[Group]:
        while True:
            yield whole[0]

    assert len(list(take_cases(endless(), 9))) == 3


def test_parts_that_cannot_be_measured() -> None:
    with pytest.raises(EvalError, match="task toy: the data at hand give no case"):
        Part("toy", task(1), (), True)
    one = groups(1, 1)[0]
    with pytest.raises(EvalError, match="task toy: two cases are called 'g0/c/0'"):
        Part("toy", task(1), (one, one), True)


def test_methods() -> None:
    names = [method.name for method in parse_methods(["seams@0.20", "none", "full", "seams@0.2"])]
    assert names == ["full", "seams@0.2", "none"]
    assert [m.name for m in parse_methods([])] == ["full"]
    assert {"full", "no_context", "exact_prefix", "none", "seams@0.1"} <= set(default_methods())
    assert tuple(m.name for m in parse_methods(default_methods())) == default_methods()
    assert all(method.settings["publish"] is False for method in parse_methods(default_methods()))
    assert parse_methods(["seams@0.25"])[1].settings == {
        "reuse": "approximate",
        "selector": "seams",
        "recompute_ratio": 0.25,
        "publish": False,
    }


@pytest.mark.parametrize("name", ["", "seams", "@0.2", "seams@", "seams@1.1", "seams@-1", "a@nan"])
def test_no_method(name: str) -> None:
    with pytest.raises(EvalError, match="allowed are full, no_context, exact_prefix, none, and"):
        parse_methods([name])
