"""Check and time the kernels and narrowed prefills on a bare machine, and print one table.

    eval/device/check.sh                       on a machine with a CUDA device
    eval/device/check.sh --tiny                on any CPU, in seconds: that all of it runs

Needs PyTorch, Triton and NumPy; compares with Transformers where that is there, and attends by
FlashInfer where that is. Neither SGLang nor this package's own dependencies are imported.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvshare_eval.device import flashinfer_setup
from kvshare_eval.device.budget import Budget
from kvshare_eval.device.checks import attention_checks, kernel_checks
from kvshare_eval.device.flashinfer_setup import Compiling, MakeWrapper
from kvshare_eval.device.floors import measured
from kvshare_eval.device.report import FAILED, PASSED, Line, Section, table
from kvshare_eval.device.runner_checks import runner_checks
from kvshare_eval.device.sections import (
    GPU,
    SMALLEST,
    Machine,
    ModelSteps,
    attention_steps,
    check_steps,
    kernel_steps,
    planning_steps,
    rate_lines,
)
from kvshare_eval.device.ttft import quickest_kernel

#: Of the budget, what FlashInfer's compilation may leave no less of.
KEPT_FOR_TIMES_S = 200
NO_GPU = "A CPU's run: no time below is a GPU's figure, and no goal is judged by it."


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every check passed, 1 when one failed, 2 when there is no device."""
    parser = argparse.ArgumentParser(prog="check.sh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at the smallest sizes")
    parser.add_argument("--seconds", type=float, default=480, help="no case begins after them")
    parser.add_argument("--out", type=Path, help="a file that the table is written to as well")
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        print("check: no CUDA device is found; --tiny runs on a CPU", file=sys.stderr)
        return 2
    # Sums in full fp32 where fp32 is checked.
    torch.backends.cuda.matmul.allow_tf32 = False
    budget = Budget(given.seconds)
    on_gpu = not given.tiny
    about: dict[str, str] = {}
    try:
        _run(budget, on_gpu, about)
    except Exception as error:
        # What was found until then is told all the same.
        what = f"{type(error).__name__}: {str(error)[:200]}"
        budget.sections.append(Section("the run", (Line("ended early", what, verdict=FAILED),)))
    notes = _notes(on_gpu, about)
    report = "\n".join([*notes, "", table(budget.sections), "", *_ending(budget)])
    print(report)
    if given.out is not None:
        given.out.write_text(report + "\n")
    return 1 if budget.verdicts(FAILED) else 0


def _run(budget: Budget, on_gpu: bool, about: dict[str, str]) -> None:
    """Fill the budget's sections, and ``about`` with what is to be said above the table."""
    device = "cuda" if on_gpu else "cpu"
    sizes = GPU if on_gpu else SMALLEST
    dtype = torch.bfloat16 if on_gpu else torch.float32
    compiling = None
    if on_gpu and flashinfer_setup.found():
        # Beside the checks, which time nothing.
        compiling = Compiling([shape.head_dim for shape in sizes.models])
    budget.run("kernels against fp64", check_steps(kernel_checks(device), 20))
    make, about["FlashInfer"] = _flashinfer(compiling, budget)
    budget.run("narrowed attention against fp64", check_steps(attention_checks(device, make), 20))
    budget.run("model runner", check_steps(runner_checks(device, make), 20))
    kernel = None
    if on_gpu:
        kernel, told = quickest_kernel(sizes.rows_shape, 8192)
        about["causal attention of full prefills"] = f"{kernel.name}; of 8,192 tokens {told}"
    rates = measured(device, dtype, copied=sizes.copied, width=sizes.width)
    machine = Machine(device, dtype, rates, make, kernel)
    budget.sections.append(Section("the device", tuple(rate_lines(machine))))
    budget.run("kernels, times", kernel_steps(machine, sizes))
    budget.run("narrowed attention of one layer, times", attention_steps(machine, sizes))
    budget.run("planning on the host, times", planning_steps(machine, sizes))
    for shape in sizes.models:
        free = math.inf
        if on_gpu:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        model = ModelSteps(machine, sizes, shape, 0.95 * free)
        budget.left_out += model.left_out
        budget.run(f"time to the first token, {shape.name}, 95 % reused", model.steps())
        # Its weights and pool, before those of the next.
        del model


def _flashinfer(compiling: Compiling | None, budget: Budget) -> tuple[MakeWrapper | None, str]:
    if compiling is None:
        return None, "not here: narrowed rows attend in PyTorch"
    works, told = compiling.result(budget.left_s - KEPT_FOR_TIMES_S)
    if works:
        try:
            return flashinfer_setup.wrapper_maker(), told
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    return None, f"not used, narrowed rows attend in PyTorch: {told}"


def _notes(on_gpu: bool, about: dict[str, str]) -> list[str]:
    name = "CPU"
    if on_gpu:
        found = torch.cuda.get_device_properties(0)
        name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    return [
        f"# Device check: {name}",
        "",
        *([] if on_gpu else [f"**{NO_GPU}**", ""]),
        f"- PyTorch {torch.__version__}, Triton {_triton()}, Python {sys.version.split()[0]}",
        *(f"- {what}: {told}" for what, told in about.items()),
        "- times: median [quartiles]; floor: the longer of operations and bytes over the rates "
        "measured here",
        "- errors: largest difference over the root mean square of what is right",
    ]


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _ending(budget: Budget) -> list[str]:
    failed, passed = budget.verdicts(FAILED), budget.verdicts(PASSED)
    told = f"{len(failed)} FAILED: {'; '.join(failed)}" if failed else "all passed"
    return [
        f"{budget.used_s:.0f} s of {budget.seconds:.0f} s used.",
        "Left out: " + ("; ".join(budget.left_out) if budget.left_out else "nothing") + ".",
        f"Checks: of {len(failed) + len(passed)} that ran {told}",
    ]


if __name__ == "__main__":
    sys.exit(main())
