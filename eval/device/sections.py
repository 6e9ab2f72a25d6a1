"""What is run, section by section, and how its results read as lines of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from kvshare_eval.device.attention_rows import RowsCase, in_spans, scattered
from kvshare_eval.device.attention_timings import attention_times
from kvshare_eval.device.budget import Step
from kvshare_eval.device.checks import Check, Pending
from kvshare_eval.device.flashinfer_setup import MakeWrapper
from kvshare_eval.device.floors import Rates, Work
from kvshare_eval.device.host_planning import choosing_time, planning_times
from kvshare_eval.device.kv_pool import KVPool
from kvshare_eval.device.model_shapes import LLAMA_1B, LLAMA_8B, TINY, ModelShape
from kvshare_eval.device.model_weights import random_weights
from kvshare_eval.device.prompts import ReusedPrompt
from kvshare_eval.device.report import FAILED, PASSED, Line, judged
from kvshare_eval.device.reusing import CHECK_LAYER
from kvshare_eval.device.timed_cases import Timed, copy_case, mask_case, rows_case, score_case
from kvshare_eval.device.timings import Spread, device_ms, number
from kvshare_eval.device.ttft import SEAMS_ONLY, WAYS, FirstToken, FirstTokens, Way, needed_bytes
from sglang_kvshare.plan import BoolArray

#: Goals. Of copies a share of the measured bandwidth, of attention a factor on the causal kernel,
#: of planning ms, of first tokens a share of what the computed rows allow, by prompt tokens.
COPY_SHARE, CAUSAL_FACTOR, PLANNING_MS = 0.8, 1.3, 2.0
EFFICIENCY = {8192: 0.85, 32_768: 0.9}
#: And how many times shorter than in full, of the model with 32 layers.
CHECKED, SEAMS = Way(0.1, CHECK_LAYER), Way(SEAMS_ONLY)
SHORTER = {CHECKED: 4.2, SEAMS: 10.0}


@dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        copied: bytes of the buffer that bandwidth is measured with.
        width: of the matrices that the rate of products is measured with.
        case_tokens: of the kernels' cases.
        copy_layers: of the case of copies.
        rows_tokens: of the cases of attention.
        planned_tokens: of the batch that the host plans.
        models: each with the lengths of its prompts, those that goals are set for first.
        passage_tokens: of the prompts.
        runs: of each time to the first token.
    """

    copied: int
    width: int
    case_tokens: tuple[int, ...]
    copy_layers: int
    rows_shape: ModelShape
    rows_tokens: tuple[int, ...]
    planned_tokens: int
    models: tuple[ModelShape, ...]
    prompts: tuple[int, ...]
    passage_tokens: int
    runs: int


GPU = Sizes(
    copied=2 << 30,
    width=8192,
    case_tokens=(8192, 32_768),
    copy_layers=32,
    rows_shape=LLAMA_8B,
    rows_tokens=(8192, 32_768),
    planned_tokens=32_768,
    models=(LLAMA_8B, LLAMA_1B),
    prompts=(8192, 32_768, 2048),
    passage_tokens=512,
    runs=7,
)
#: For a CPU, in seconds: it shows that all runs, and no more.
SMALLEST = Sizes(
    copied=1 << 20,
    width=64,
    case_tokens=(64,),
    copy_layers=2,
    rows_shape=TINY,
    rows_tokens=(256,),
    planned_tokens=2048,
    models=(TINY,),
    prompts=(256,),
    passage_tokens=64,
    runs=3,
)


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        make: FlashInfer's wrapper, where it can be used.
        kernel: PyTorch's causal kernel for prefills in full.
    """

    device: str
    dtype: torch.dtype
    rates: Rates
    make: MakeWrapper | None
    kernel: SDPBackend | None

    @property
    def judges(self) -> bool:
        return self.device == "cuda"

    def ms(self, spread: Spread) -> str:
        """As text; marked where it is no GPU's."""
        return f"{spread} ms" + ("" if self.judges else " (CPU)")

    def floor(self, work: Work, spread: Spread) -> tuple[str, str]:
        """The floor and the share of it, as text."""
        floor = self.rates.floor_ms(work)
        return f"{number(floor)} ms: {work}", f"{100 * floor / spread.median_ms:.0f} %"


def check_steps(pending: Iterable[Pending], needs_s: float) -> Iterator[Step]:
    """A step for each check."""
    for name, run in pending:
        yield Step(name, needs_s, partial(_check_lines, run))


def _check_lines(run: Callable[[], Check]) -> Iterator[Line]:
    check = run()
    yield Line(
        check.name,
        f"error {check.error:.1e}, limit {check.limit:.0e}",
        beside=check.beside,
        verdict=PASSED if check.passes else FAILED,
    )


def rate_lines(machine: Machine) -> Iterator[Line]:
    rates = machine.rates
    yield Line(
        "copy within the device",
        machine.ms(rates.copy_ms),
        floor=str(Work(0, rates.copy_bytes)),
        beside=f"{rates.bytes_per_ms / 1e6:.0f} GB/s, read and written",
    )
    yield Line(
        f"product of matrices, {machine.dtype}".replace("torch.", ""),
        machine.ms(rates.product_ms),
        floor=str(Work(rates.product_operations)),
        beside=f"{rates.operations_per_ms / 1e9:.3g} TFLOP/s",
    )


# --- kernels --------------------------------------------------------------------------------------


def kernel_steps(machine: Machine, sizes: Sizes) -> Iterator[Step]:
    for tokens in sizes.case_tokens:
        cases = (
            partial(copy_case, tokens, layers=sizes.copy_layers, device=machine.device),
            partial(score_case, tokens, device=machine.device),
            partial(rows_case, tokens, 0.1, device=machine.device),
            # Longer ones are masked in two parts.
            partial(mask_case, min(tokens, 16_384), 0.1, device=machine.device),
        )
        for case in cases:
            name = f"{case.func.__name__} {tokens}"
            yield Step(name, 15, partial(_kernel_lines, machine, case))


def _kernel_lines(machine: Machine, make: Callable[[], Timed]) -> Iterator[Line]:
    case = make()
    runs = 20 if machine.judges else 3
    # Of its own accord it is the kernel on a device, and the reference elsewhere.
    spread = device_ms(lambda: case.run(None), machine.device, runs=runs)
    naive = device_ms(lambda: case.run(False), machine.device, warm_up=1, runs=5)
    work = Work(case.operations, case.moved_bytes)
    floor, share = machine.floor(work, spread)
    goal = verdict = ""
    if case.name.startswith("copy_rotate"):
        goal = f"{100 * COPY_SHARE:.0f} % of copy bandwidth"
        reached = machine.rates.floor_ms(work) >= COPY_SHARE * spread.median_ms
        verdict = judged(reached, machine.judges)
    yield Line(
        case.name,
        machine.ms(spread),
        floor,
        share,
        f"in PyTorch {machine.ms(naive)}",
        goal,
        verdict,
    )


# --- attention and planning -----------------------------------------------------------------------


def attention_steps(machine: Machine, sizes: Sizes) -> Iterator[Step]:
    for tokens in sizes.rows_tokens:
        for name, keep in (
            ("scattered, 10 %", scattered(tokens, 0.1)),
            ("scattered, 40 %", scattered(tokens, 0.4)),
            ("in spans, 10 %", in_spans(tokens, 0.1)),
        ):
            title = f"rows {name} of {tokens}"
            yield Step(title, 15, partial(_attention_lines, machine, sizes.rows_shape, title, keep))


def _one_layer(machine: Machine, shape: ModelShape, keep: BoolArray) -> RowsCase:
    one = replace(shape, layers=1)
    return RowsCase(one, KVPool(one, len(keep), machine.dtype, machine.device), keep)


def _attention_lines(
    machine: Machine, shape: ModelShape, title: str, keep: BoolArray
) -> Iterator[Line]:
    case = _one_layer(machine, shape, keep)
    times = attention_times(case, machine.make, machine.device)
    floor, share = machine.floor(times.work, times.narrowed)
    factor = times.narrowed.median_ms / times.causal.median_ms
    beside = f"causal {machine.ms(times.causal)}: factor {number(factor)}"
    if machine.make is not None:
        beside += f"; in PyTorch {machine.ms(times.naive)}"
    yield Line(
        f"{title}, {times.form}",
        machine.ms(times.narrowed),
        floor,
        share,
        beside,
        f"{CAUSAL_FACTOR} times causal",
        judged(factor <= CAUSAL_FACTOR, machine.judges),
    )


def planning_steps(machine: Machine, sizes: Sizes) -> Iterator[Step]:
    tokens = sizes.planned_tokens
    for name, keep in (
        ("scattered", scattered(tokens, 0.1)),
        ("in spans", in_spans(tokens, 0.1)),
    ):
        title = f"host plans {tokens} tokens, 10 % {name}"
        yield Step(title, 10, partial(_planning_lines, machine, sizes.rows_shape, title, keep))
    title = f"host chooses 10 % of {tokens} tokens by score"
    yield Step(title, 5, partial(_choosing_lines, machine, title, tokens))


def _planning_lines(
    machine: Machine, shape: ModelShape, title: str, keep: BoolArray
) -> Iterator[Line]:
    case = None if machine.make is None else _one_layer(machine, shape, keep)
    times = planning_times(keep, shape.group, case, machine.make)
    whole = times.plan_made or times.rows_planned
    yield Line(
        f"{title}, {times.form}",
        f"{whole} ms (host)",
        beside="" if times.plan_made is None else f"without FlashInfer's {times.rows_planned} ms",
        goal=f"{PLANNING_MS:.0f} ms a batch",
        # The CPU of a machine without the device is not the one that will plan.
        verdict=judged(whole.median_ms <= PLANNING_MS, machine.judges),
    )


def _choosing_lines(machine: Machine, title: str, tokens: int) -> Iterator[Line]:
    spread = choosing_time(tokens, 0.1)
    yield Line(
        title,
        f"{spread} ms (host)",
        goal=f"{PLANNING_MS:.0f} ms a batch",
        verdict=judged(spread.median_ms <= PLANNING_MS, machine.judges),
    )


# --- first tokens ---------------------------------------------------------------------------------


class ModelSteps:
    """The times to the first token of one model, whose weights are made by the first step.

    Args:
        free_bytes: of device memory; prompts that do not fit are left out.
    """

    def __init__(
        self, machine: Machine, sizes: Sizes, shape: ModelShape, free_bytes: float
    ) -> None:
        self._machine, self._sizes, self._shape = machine, sizes, shape
        itemsize = machine.dtype.itemsize
        self._prompts = [n for n in sizes.prompts if needed_bytes(shape, n, itemsize) < free_bytes]
        self.left_out = [
            f"{shape.name}, {n} tokens (no memory)" for n in sizes.prompts if n not in self._prompts
        ]
        self._timer: FirstTokens | None = None
        self._prompt: ReusedPrompt | None = None
        self._full: dict[int, FirstToken] = {}

    def steps(self) -> Iterator[Step]:
        for tokens in self._prompts:
            # The longest takes a second a run in full.
            needs_s = 3 + 20 * tokens / 32_768
            for way in WAYS:
                name = f"{self._shape.name}, {tokens} tokens, {way.name}"
                yield Step(name, needs_s, partial(self._lines, name, tokens, way))

    def _lines(self, name: str, tokens: int, way: Way) -> Iterator[Line]:
        timer, runs = self._timer or self._made(), self._sizes.runs
        if self._prompt is None or len(self._prompt.tokens) != tokens:
            self._prompt = timer.prompt(tokens)
        told = timer.time(self._prompt, way, runs)
        naive = None
        # One of them shows what the adapter is for; longer ones would take too long.
        if self._machine.make is not None and way == CHECKED and tokens <= 8192:
            naive = timer.time(self._prompt, way, 3, naive=True).time
        yield self._line(name, told, naive)

    def _made(self) -> FirstTokens:
        machine = self._machine
        self._timer = FirstTokens(
            random_weights(self._shape, machine.dtype, machine.device),
            max(self._prompts),
            machine.make,
            passage_tokens=self._sizes.passage_tokens,
            kernel=machine.kernel,
        )
        return self._timer

    def _line(self, name: str, told: FirstToken, naive: Spread | None) -> Line:
        machine = self._machine
        floor, share = machine.floor(told.work, told.time)
        if told.way.ratio is None:
            self._full[told.prompt_tokens] = told
        if not told.finite:
            return Line(name, "not finite", verdict=FAILED)
        full = self._full.get(told.prompt_tokens)
        beside = goal = verdict = ""
        if told.way.ratio is not None and full is not None:
            shorter = full.time.median_ms / told.time.median_ms
            efficiency = shorter * told.share
            beside = (
                f"{number(shorter)} times shorter, {number(efficiency)} of what "
                f"{100 * told.share:.1f} % of the rows allow"
            )
            goals = list(self._goals(told, efficiency, shorter))
            goal = ", ".join(text for text, _ in goals)
            if goals:
                verdict = judged(all(reached for _, reached in goals), machine.judges)
        if naive is not None:
            beside += f"; attention in PyTorch {machine.ms(naive)}"
        return Line(name, machine.ms(told.time), floor, share, beside, goal, verdict)

    def _goals(
        self, told: FirstToken, efficiency: float, shorter: float
    ) -> Iterator[tuple[str, bool]]:
        wanted = EFFICIENCY.get(told.prompt_tokens)
        if wanted is None:
            return
        yield f"{wanted} of it", efficiency >= wanted
        if self._shape is LLAMA_8B:
            times = SHORTER.get(told.way)
            if times is not None:
                yield f"{times} times", shorter >= times
