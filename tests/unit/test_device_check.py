"""The device check at its smallest, on a CPU, as it is run on a bare machine; and its parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper

from kvshare_eval.device import check, checks
from kvshare_eval.device.attention_rows import RowsCase, in_spans, scattered
from kvshare_eval.device.attention_timings import attention_times, equal_keys
from kvshare_eval.device.budget import Budget, Step
from kvshare_eval.device.checks import Check, attention_checks, equal, error_of, kernel_checks
from kvshare_eval.device.flashinfer_setup import compile_for
from kvshare_eval.device.floors import Rates, Work
from kvshare_eval.device.host_planning import planning_times
from kvshare_eval.device.kv_pool import KVPool
from kvshare_eval.device.model_shapes import LLAMA_1B, LLAMA_8B, TINY
from kvshare_eval.device.model_weights import random_weights
from kvshare_eval.device.prompts import needed_tokens, reused_prompt
from kvshare_eval.device.report import FAILED, HEAD, MET, MISSED, UNJUDGED, Line, Section, judged
from kvshare_eval.device.report import table as table_of
from kvshare_eval.device.sections import CHECKED, SEAMS, check_steps
from kvshare_eval.device.timings import Spread
from kvshare_eval.device.ttft import WAYS, FirstTokens, Way
from sglang_kvshare.attention.launches import Form

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
#: What a bare machine has none of. Transformers and PyTorch need none of these.
ABSENT = ("sglang", "rich", "typer", "pydantic", "faiss", "rapidfuzz", "flashinfer")
#: Put before everything else: what is absent cannot be imported, nor what is installed editable.
GUARD = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"guarded: {{name}}", name=name)

sys.meta_path[:] = [Guard()] + [f for f in sys.meta_path if "editable" not in str(f).lower()]
"""


def make(workspace):
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")


def bare(tmp_path):
    """The environment of a machine that has nothing of this project's."""
    (tmp_path / "sitecustomize.py").write_text(GUARD.format(absent=ABSENT))
    named = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    return {**named, "OMP_NUM_THREADS": "1"}


# --- the script -----------------------------------------------------------------------------------


def test_it_runs_on_a_bare_machine(tmp_path):
    environment, written = bare(tmp_path), tmp_path / "table.md"
    result = subprocess.run(
        [ROOT / "eval/device/check.sh", "--tiny", "--seconds", "3600", "--out", written],
        env=environment,
        # Nothing is found by standing in the right folder.
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert check.NO_GPU in result.stdout
    assert "Left out: nothing." in result.stdout
    assert re.search(r"Checks: of 2\d that ran all passed", result.stdout)
    assert written.read_text() == result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    verdicts = [row.split("|")[-2].strip() for row in rows]
    # No goal is judged by a CPU's times.
    assert {MET, MISSED, FAILED}.isdisjoint(verdicts)
    assert verdicts.count("ok") >= 20
    assert verdicts.count(UNJUDGED) >= 5
    times = [row for row in rows if " ms " in row and "error" not in row]
    assert all("(CPU)" in row or "(host)" in row for row in times), times
    for way in WAYS:
        assert re.search(rf"tiny, 256 tokens, {re.escape(way.name)} ", result.stdout)


def test_the_guard_would_notice(tmp_path):
    """The control: what is absent cannot be imported, nor the packages without the script."""
    names = (*ABSENT, "kvshare_eval", "sglang_kvshare")
    program = f"""
import importlib
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    print(name)
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=bare(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert found.stdout == ""


def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: Check("wrong", 0.5, 0.1), "error 5.0e-01, limit 1e-01"),
        (lambda: Check("wrong", float("nan"), 0.1), "error nan"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_failed_check_ends_with_1(run, text, monkeypatch, capsys):
    def one(budget, on_gpu, about):
        budget.run("checks", check_steps([("wrong", run)], 0))

    monkeypatch.setattr(check, "_run", one)
    assert check.main(["--tiny"]) == 1
    told = capsys.readouterr().out
    assert "Checks: of 1 that ran 1 FAILED: wrong" in told
    assert text in told


def test_what_was_found_before_an_end_is_told(monkeypatch, capsys):
    def broken(budget, on_gpu, about):
        budget.run("checks", check_steps([("right", lambda: Check("right", 0.0, 0.0))], 0))
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(check, "_run", broken)
    assert check.main(["--tiny"]) == 1
    told = capsys.readouterr().out
    assert "RuntimeError: the device is gone" in told
    assert re.search(r"\| right .* ok ", told)


# --- its parts ------------------------------------------------------------------------------------


def test_no_step_begins_that_would_not_end_in_the_budget():
    begun = []

    def step(name, needs_s):
        return Step(name, needs_s, lambda: [begun.append(name) or Line(name)])

    def full():
        raise torch.OutOfMemoryError("too large")

    budget = Budget(100)
    budget.run("steps", [step("short", 1), step("long", 101), Step("large", 1, full)])
    assert begun == ["short"]
    assert budget.left_out == ["long (no time)", "large (no memory)"]
    assert budget.verdicts(FAILED) == []


@pytest.mark.parametrize("place", range(3))
def test_one_wrong_number_is_an_error(place):
    wanted = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    found = wanted.to(torch.bfloat16).float()
    assert error_of(found, wanted) < checks.ROUNDING[torch.bfloat16]
    found[place] += 0.3
    assert error_of(found, wanted) > 0.2
    found[place] = float("nan")
    assert error_of(found, wanted) == float("inf")
    assert equal(wanted, wanted.clone()) == 0
    assert equal(found, wanted) == float("inf")


def test_kernels_that_are_wrong_are_noticed(monkeypatch):
    """Each check, with a fault in what it checks."""

    def spoil(name, args, told):
        if name == "copy_rotate":
            args[0].keys[1].view(torch.uint8)[args[2][3]] = 0
        elif name == "check_scores":
            args[1][2, 5] *= 1.1
        elif name == "compact_rows":
            told[1][4, 7] += 1
        elif name == "pack_mask":
            told.bits[9] ^= 4
        else:
            told[30, 2, 1] += 0.1
        return told

    for name in ("copy_rotate", "check_scores", "compact_rows", "pack_mask", "merge_parts"):
        right = getattr(checks, name)

        def wrong(*args, name=name, right=right):
            return spoil(name, args, right(*args))

        with monkeypatch.context() as patched:
            patched.setattr(checks, name, wrong)
            found = [(title, run()) for title, run in kernel_checks("cpu")]
        assert [title for title, told in found if not told.passes] == [
            title for title, _ in found if title.startswith(name)
        ]


def test_flashinfers_rows_are_checked_in_each_form():
    found = [run() for _, run in attention_checks("cpu", make)]
    assert all(told.passes for told in found), found
    assert [form for form in Form if any(form.value in told.name for told in found)] == list(Form)

    class Wrong(BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *args, **more):
            told = super().run(*args, **more)
            (told[0] if isinstance(told, tuple) else told)[-1, 0] *= 1.5
            return told

    wrong = [run() for _, run in attention_checks("cpu", lambda w: Wrong(w, backend="fa2"))]
    assert [told.passes for told in wrong] == [True, False, False, False]


def test_flashinfer_is_timed_and_compiled_for():
    """The calls, over the stand-in."""
    compile_for(16, make, "cpu")
    pool = KVPool(TINY, 128, torch.float32, "cpu")
    case = RowsCase(TINY, pool, scattered(128, 0.2))
    told = attention_times(case, make, "cpu")
    assert told.form in {form.value for form in Form}
    assert told.work.operations == 4 * TINY.query_heads * TINY.head_dim * case.pairs
    assert planning_times(scattered(128, 0.2), TINY.group, case, make).plan_made is not None


@pytest.mark.parametrize("keep", [scattered(300, 0.2), in_spans(300, 0.1, 60)])
def test_the_causal_kernel_is_given_the_same_work(keep):
    case = RowsCase(TINY, KVPool(TINY, 300, torch.float32, "cpu"), keep)
    rows, keys = len(case.positions), equal_keys(case)
    assert keep[-1]
    assert rows == keep.sum()
    pairs = sum(keys - rows + number + 1 for number in range(rows))
    assert abs(pairs - case.pairs) <= rows / 2


def test_first_tokens_are_told_with_their_work():
    timer = FirstTokens(random_weights(TINY, torch.float32, "cpu"), 256, make, passage_tokens=64)
    prompt = timer.prompt(256)
    full, checked, seams = (timer.time(prompt, way, 1) for way in (Way(), CHECKED, SEAMS))
    assert full.share == 1
    assert seams.share < checked.share < 1
    assert all(told.finite for told in (full, checked, seams))
    assert seams.work.operations < checked.work.operations < full.work.operations
    layer = 2 * 256 * (TINY.qkv_parameters + TINY.other_parameters)
    pairs = 4 * TINY.query_heads * TINY.head_dim * 256 * 257 // 2
    head = 2 * TINY.hidden * TINY.vocabulary
    assert full.work.operations == TINY.layers * (layer + pairs) + head
    # Copies are read and written; a check layer needs those of tokens that are recomputed as well.
    copied = 2 * TINY.layers * TINY.token_bytes(4)
    recomputed = 4 * 8
    assert checked.work.moved_bytes - full.work.moved_bytes == copied * prompt.plan.matched_tokens
    assert checked.work.moved_bytes - seams.work.moved_bytes == copied * recomputed


def test_a_prompts_passages_come_from_other_places():
    pool = KVPool(TINY, needed_tokens(2048), torch.float32, "cpu")
    prompt = reused_prompt(pool, TINY.vocabulary, 2048)
    plan = prompt.plan
    assert plan.matched_tokens == round(0.95 * 2048)
    assert len(plan.spans) == 4
    assert [span.source for span in plan.spans] != sorted(span.source for span in plan.spans)
    assert all(span.start != span.source for span in plan.spans)
    at, sources = plan.positions(), plan.sources()
    assert torch.equal(prompt.tokens[at], prompt.donor_tokens[sources])
    assert np.array_equal(prompt.donor_slots.numpy()[sources], plan.slots())
    rows = torch.cat([prompt.slots, prompt.donor_slots])
    assert len(rows.unique()) == len(rows)
    assert rows.min() >= 16
    assert plan.spans[-1].end < 2048


def test_floors_are_the_longer_of_operations_and_bytes():
    spread = Spread.of([2.0])
    rates = Rates(spread, 100, Spread.of([1.0, 4.0, 4.0]), 400)
    assert (rates.bytes_per_ms, rates.operations_per_ms) == (50, 100)
    assert rates.floor_ms(Work(1000, 100)) == 10
    assert rates.floor_ms(Work(100, 1000)) == 20
    assert str(Work(2_500_000_000_000, 4096)) == "2.5 TFLOP, 4.1 kB"


def test_the_shapes_are_those_of_the_models():
    assert round((LLAMA_8B.parameters + LLAMA_8B.hidden * LLAMA_8B.vocabulary) / 1e9, 2) == 8.03
    # Tied: embeddings and output are one matrix.
    assert round(LLAMA_1B.parameters / 1e9, 2) == 1.24


def test_a_table_has_as_many_cells_in_each_row():
    told = table_of([Section("a", (Line("x | y", "1\n2"), Line("z"))), Section("none", ())])
    lines = told.splitlines()
    assert len(lines) == 5
    assert {line.count("|") for line in lines} == {len(HEAD) + 1}
    assert "x / y" in told
    assert "none" not in told


def test_a_goal_is_judged_where_there_is_a_device():
    assert [judged(True, True), judged(False, True), judged(True, False)] == [MET, MISSED, UNJUDGED]
