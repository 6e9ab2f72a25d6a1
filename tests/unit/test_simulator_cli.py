"""``kvshare eval simulate``: tables, kept outcomes, errors in one sentence, and a stub server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from serving_stub import Stub
from typer.testing import CliRunner, Result

from kvshare_eval.cli import app
from kvshare_eval.simulator.cli_options import Experiment
from kvshare_eval.simulator.costs import load_costs

pytestmark = pytest.mark.unit

SMALL = ["--workload", "plain:prompt=100,output=5", "--requests", "60", "--costs", "this-cpu"]
SLOS = ["--slo-ttft-ms", "3000", "--slo-tbt-ms", "400"]


def told(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words])


def test_sides_are_compared_with_the_first() -> None:
    got = told("run", *SMALL, "--rate", "1", "--side", "stock", "--side", "kvshare-budget")
    assert got.exit_code == 0, got.output
    assert "| `stock` |" in got.stdout
    assert "`stock` over the side" in got.stdout
    assert "| `kvshare-budget` | 1.0" in got.stdout


def test_outcomes_are_kept_and_not_simulated_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["run", *SMALL, "--rate", "1", "--repeats", "2", "--out", str(out)]
    first, again = told(*words), told(*words)
    assert first.exit_code == again.exit_code == 0, first.output
    assert first.stdout == again.stdout
    assert len((out / "records.jsonl").read_text().splitlines()) == 4
    facts = json.loads((out / "run.json").read_text())
    assert (facts["kind"], facts["settings"]["requests"]) == ("simulation", 60)
    other = told("run", *SMALL, "--requests", "61", "--out", str(out))
    assert other.exit_code == 2
    assert "requests" in other.output


def test_the_sweep_finds_what_each_side_stands() -> None:
    got = told("sweep", *SMALL, *SLOS, "--rate", "1", "--side", "stock")
    assert got.exit_code == 0, got.output
    assert "req/s at 90 %" in got.stdout
    assert "| `stock` |" in got.stdout


def test_the_ablation_has_every_part_off_and_alone() -> None:
    got = told("ablate", *SMALL, "--rate", "1", "--requests", "20")
    assert got.exit_code == 0, got.output
    assert all(f"`kvshare-{part}`" in got.stdout for part in ("order", "reserve", "hold"))
    assert all(f"`stock+{part}`" in got.stdout for part in ("victims", "preempt", "budget"))


@pytest.mark.parametrize(
    ("command", "own"), [("run", {"side"}), ("ablate", set()), ("sweep", {"side"})]
)
def test_experiments_have_the_same_options(command: str, own: set[str]) -> None:
    group = typer.main.get_command(app).commands["simulate"]  # type: ignore[attr-defined]
    found = {option.name: option for option in group.commands[command].params}
    common = {field.name: field.default for field in dataclasses.fields(Experiment)}
    assert set(found) - {"help"} == {"rate", *own, *common}
    assert {name: found[name].default for name in common} == common


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--side", "nobody"], "unknown side"),
        (["--costs", "nothing.yaml"], "presets are"),
        (["--slo-ttft-ms", "-1"], "above 0"),
        (["--workload", "nowhere"], "Allowed are"),
        (["--workload", "mooncake"], "mooncake"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: list[str], said: str) -> None:
    got = told("run", *SMALL, *words)
    assert got.exit_code == 2
    assert said in got.output


def test_a_server_is_measured_and_simulated(tmp_path: Path) -> None:
    costs = tmp_path / "stub.yaml"
    with Stub(delay_s=0.05, gaps_s=(0.01,)) as stub:
        got = told(
            *("calibrate", "--url", stub.url, "--out", str(costs), "--repeats", "1"),
            *("--prompt-tokens", "16,64,128", "--batches", "1", "--context-tokens", "8,16,32"),
        )
        assert got.exit_code == 0, got.output
        assert "worst error" in got.stdout
        made = load_costs(str(costs))
        # Whatever the length, the stub takes its time; a busy machine takes some more.
        assert 50 <= made.prefill_ms(64, 64 * 64) < 500
        assert 10 <= made.decode_ms(1, 16) < 100
        got = told(
            *("validate", "--url", stub.url, "--costs", str(costs), "--requests", "5"),
            *("--workload", "plain:prompt=32,output=4", "--rate", "2"),
        )
        assert got.exit_code in (0, 1), got.output
        assert all(f"ttft_p{q}_ms" in got.stdout for q in (50, 95))
        assert stub.bodies[-1]["sampling_params"]["ignore_eos"]


def test_no_server_is_said_so(tmp_path: Path) -> None:
    got = told("validate", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert got.exit_code == 2
    assert "no SGLang server" in got.output
