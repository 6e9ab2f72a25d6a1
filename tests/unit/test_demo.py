"""The demo's workload and report; its servers are tested in test_demo_servers.py."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvshare_eval import demo
from kvshare_eval.demo import Measured, Turn
from kvshare_eval.passages import load_passages, render_passage
from kvshare_eval.servers import Answer, ServerError

pytestmark = pytest.mark.unit


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def answer(ttft: float, text: str = "an answer", reused: int | None = None) -> Answer:
    meta: dict[str, Any] = {"prompt_tokens": 1311, "cached_tokens": 36}
    if reused is not None:
        counts = {"prefix_tokens": 37, "reused_tokens": reused, "recomputed_tokens": 64}
        report = {**counts, "new_tokens": 1210 - reused, "reason": "no_match"}
        meta["cached_tokens_details"] = {"device": 37, "kvshare": report}
    return Answer(text, ttft, meta)


def results(reused: int = 1000) -> list[Measured]:
    passages, _ = demo.choose_passages(load_passages())
    turns = demo.make_turns(passages, letters)
    times = (9.0, 1.0, 2.0, 3.0, 40.0)
    return [
        Measured(turn, answer(seconds, reused=reused), answer(2 * seconds), answer(3 * seconds))
        for turn, seconds in zip(turns, times, strict=True)
    ]


def rendered(table: object) -> str:
    console = Console(width=demo.PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_orders_are_different_permutations_and_always_the_same() -> None:
    orders = demo.choose_orders()
    assert orders == demo.choose_orders()
    assert len(set(orders)) == 5
    assert all(sorted(order) == [1, 2, 3, 4, 5] for order in orders)


def test_warm_up_shares_no_passage_with_the_requests() -> None:
    asked, others = demo.choose_passages(load_passages())
    assert len(asked) == len(others) == 5
    assert not {passage.id for passage in asked} & {passage.id for passage in others}


def test_each_turn_asks_about_another_passage_and_holds_all_of_them() -> None:
    passages, _ = demo.choose_passages(load_passages())
    turns = demo.make_turns(passages, letters)
    assert [turn.question for turn in turns] == [passage.questions[0] for passage in passages]
    for turn in turns:
        prompt = "".join(map(chr, turn.input_ids))
        places = [prompt.index(render_passage(passages[number - 1])) for number in turn.order]
        assert places == sorted(places)
        assert turn.question.question in prompt


def test_times_table_fits_and_takes_medians_of_the_later_requests() -> None:
    lines = rendered(demo.times_table(results())).splitlines()
    assert "…" not in "".join(lines)
    first = next(line for line in lines if "1: 1 2 3 4 5" in line)
    assert first.split()[6:] == [
        *("1311", "37", "1000", "64", "210"),
        *("9.00", "s", "18.00", "s", "27.00", "s", "36", "2.0", "x", "3.0", "x"),
    ]
    median = next(line for line in lines if "median" in line)
    assert median.split()[2:8] == ["2.50", "s", "5.00", "s", "7.50", "s"]


@pytest.mark.parametrize(("slowest", "warned"), [(2.4, False), (5.0, True)])
def test_unequal_times_for_equal_work_are_pointed_out(slowest: float, warned: bool) -> None:
    turn = results()[0].turn
    first = Measured(turn, answer(2.0), answer(slowest), answer(2.1))
    warning = demo.caution([first, *results()[1:]])
    assert (warning is not None) == warned
    assert warning is None or "from 2.00 to 5.00 s" in warning


def test_answers_show_stock_only_where_it_differs() -> None:
    turn = Turn((1, 2), results()[0].turn.question, (1,))
    same = Measured(turn, answer(1, "[ours]"), answer(1, "full"), answer(1, "full"))
    other = Measured(turn, answer(1, "[ours]"), answer(1, "full"), answer(1, "another"))
    text = rendered(demo.answers_table([same, other]))
    assert text.count("[ours]") == 2
    assert text.count("stock: another") == 1


def test_a_server_without_kvshare_is_an_error() -> None:
    with pytest.raises(ServerError, match="KVShare was not active"):
        demo.count(answer(1.0), "reused_tokens")


def test_provenance_names_model_machine_and_versions() -> None:
    info = {"version": "9.9", "dtype": "float32", "device": "cpu", "attention_backend": "x"}
    text = demo.provenance(Path("/models/m"), info, ["--tp", "1"], demo.describe_machine())
    assert all(part in text for part in ("Model m, float32", "SGLang 9.9", "cores", "--tp 1"))
    assert max(map(len, text.splitlines())) <= demo.PLAIN_WIDTH


def run_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Any) -> Any:
    """The command with everything around the report replaced; its logs go to ``tmp_path/logs``."""

    def measure(*_: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, {"version": "9.9"}

    def mkdtemp(prefix: str) -> str:
        (tmp_path / "logs").mkdir()
        return str(tmp_path / "logs")

    monkeypatch.setattr(demo, "measure", measure)
    monkeypatch.setattr(demo, "chat_encoder", lambda model: letters)
    monkeypatch.setattr(demo.tempfile, "mkdtemp", mkdtemp)
    app = demo.typer.Typer()
    app.command()(demo.main)
    return CliRunner().invoke(app, ["--model", "m"])


def test_command_reports_and_leaves_no_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_main(monkeypatch, tmp_path, results())
    assert result.exit_code == 0, result.output
    assert "passage 5: " in result.stdout
    assert "Where the figures come from" in result.stdout
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (results(reused=0), "nothing was reused (reasons given: no_match)"),
        (ServerError("the server ended with code 3"), "the server ended with code 3"),
    ],
)
def test_command_fails_with_the_reason_and_the_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Any, message: str
) -> None:
    result = run_main(monkeypatch, tmp_path, outcome)
    assert result.exit_code == 1
    assert message in result.stderr
    assert str(tmp_path / "logs") in result.stderr
    assert (tmp_path / "logs").exists()
