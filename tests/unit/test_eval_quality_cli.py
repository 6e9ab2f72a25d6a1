"""``kvshare eval quality`` as a whole on a toy server; rendering, registry, time left."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from quality_stub import CHAT_TEMPLATE, Toy, ToyServer, make_tokenizer
from rich.console import Console
from typer.testing import CliRunner

from kvshare_eval import front, progress
from kvshare_eval.cli import app
from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.progress import Counting
from kvshare_eval.quality.cases import Message, Prompt, user
from kvshare_eval.quality.record import from_dict
from kvshare_eval.quality.tasks import METRICS, find_task, register_task, tasks
from kvshare_eval.rendering import Renderer, load_renderer
from kvshare_eval.run_dir import load_run

pytestmark = pytest.mark.unit

TASKS = ("squad:passages=2,questions=1", "needle:words=150")
METHODS = ("no_context", "exact_prefix", "none", "seams@0.5")
SMALL = ["--cases", "2", *(word for task in TASKS for word in ("--task", task))]
SMALL += [word for method in METHODS for word in ("--method", method)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret") / "tiny"
    make_tokenizer(folder, CHAT_TEMPLATE)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[ToyServer]:
    with ToyServer(toy=Toy(end=4)) as running:
        running.server_info["tokenizer_path"] = str(folder)
        yield running


def call(*words: object, code: int = 0) -> str:
    """What the command says; ``sys.argv`` is what it would be."""
    said = [str(word) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvshare", "eval", *said])
        result = CliRunner().invoke(app, said, env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def sentence(*words: object) -> str:
    """The one line of a command that refuses."""
    said = [line for line in call(*words, code=2).splitlines() if line.startswith("kvshare: ")]
    assert len(said) == 1
    return said[0]


def test_the_whole_command_and_its_report(server: ToyServer, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    words = ["quality", "--url", server.url, "--tokenizer", folder, "--out", out, *SMALL]
    said = call(*words, "--api-key", "s3cret")
    assert "squad:passages=2,questions=1: 2 cases in" in said
    assert f"kvshare eval report {out}" in said.replace("\n", "")
    run = load_run(out)
    assert (run.kind, run.settings["tasks"], run.settings["model"]) == (
        "quality",
        list(TASKS),
        "tiny",
    )
    assert run.settings["methods"] == ["full", *METHODS]
    (info,) = [record for record in run.records if record.get("type") == "server"]
    assert (info["model"], info["dtype"]) == ("toy", "float32")
    records = [from_dict(each) for each in run.records if "method" in each]
    keys = {record.key for record in records}
    assert len(records) == len(keys) == 2 * 2 * 5
    for task in TASKS:
        assert {r.method for r in records if r.task == task} == {"full", *METHODS}
    assert all(r.answer is not None and r.metric in r.scores for r in records)
    assert all(r.report["reused_tokens"] > 20 for r in records if r.method in ("none", "seams@0.5"))
    assert server.headers["Authorization"] == "Bearer s3cret"
    text = "".join(file.read_text() for file in out.iterdir())
    for secret in ("s3cret", "secret", "127.0.0.1", "http:", str(tmp_path), str(folder.parent)):
        assert secret not in text
    assert run.facts["command"].startswith("kvshare eval quality --url URL --tokenizer tiny --out")
    page = tmp_path / "page.md"
    call("report", out, "--out", page)
    shown = page.read_text()
    for name in (*TASKS, *METHODS):
        assert name in shown
    assert "No regression" in call("compare", out, out)
    # Nothing is left to be asked but whether the server can do what is wanted.
    asked = len(server.bodies)
    call(*words, "--resume")
    assert len(server.bodies) == asked + 1 + len(METHODS)
    assert load_run(out).records == run.records


def test_without_answers_and_gold(server: ToyServer, tmp_path: Path) -> None:
    words = ["quality", "--url", server.url, *SMALL, "--positions", 3, "--top", 2]
    call(*words, "--no-answers", "--out", tmp_path / "a")
    records = [from_dict(r) for r in load_run(tmp_path / "a").records if "method" in r]
    assert len(records) == 2 * 2 * 4
    assert {(r.answer, r.method == "no_context", len(r.scores)) for r in records} == {
        (None, False, 0)
    }
    assert all(len(r.divergence.kl) <= 3 for r in records if r.divergence)
    call(*words, "--no-gold", "--out", tmp_path / "b")
    records = [from_dict(r) for r in load_run(tmp_path / "b").records if "method" in r]
    assert {(r.gold, bool(r.scores)) for r in records} == {((), True)}


def test_a_server_that_dies_and_a_run_that_goes_on(server: ToyServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["quality", "--url", server.url, "--out", out, *SMALL]
    server.lives = 25
    assert "no answer from http://127.0.0.1" in sentence(*words)
    before = load_run(out).records
    assert 1 < len(before) < 21
    server.lives = None
    assert "--resume goes on with it" in sentence(*words)
    assert "was made with seed=1, not 2" in sentence(*words, "--resume", "--seed", 2)
    server.server_info["max_total_num_tokens"] = 1
    server.server_info["dtype"] = "bfloat16"
    refused = "measured on a server with dtype='float32', not 'bfloat16'"
    assert refused in sentence(*words, "--resume")
    server.server_info["dtype"] = "float32"
    assert load_run(out).records == before
    call(*words, "--resume")
    after = load_run(out).records
    assert after[: len(before)] == before
    assert len({record["key"] for record in after}) == len(after) == 21


def test_what_a_server_cannot_is_said_at_once(
    server: ToyServer, folder: Path, tmp_path: Path
) -> None:
    words = ["quality", "--url", server.url, "--task", TASKS[0], "--cases", 1]
    said = sentence(*words, "--out", tmp_path / "a", "--method", "magic@0.2")
    assert "answered 400" in said
    assert "'magic' is unknown; allowed are seams" in said
    server.server_info["tokenizer_path"] = "/no/such/tokenizer"
    said = sentence(*words, "--out", tmp_path / "a", "--method", "none")
    assert "no tokenizer at '/no/such/tokenizer' (give one with --tokenizer)" in said
    stock = {"text": "x", "output_ids": [1], "meta_info": {"prompt_tokens": 3}}
    server.reply = web.Response(text=json.dumps(stock))
    words += ["--tokenizer", folder, "--out", tmp_path / "a", "--method", "none"]
    assert "says nothing about reuse: start it with --kvshare" in sentence(*words)
    # Nothing was measured: it may be started as if for the first time.
    server.reply = None
    call(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "x"], "give the run directory to make: --out DIR"),
        (["--out", "OUT"], "give either --model, to start a server, or --url"),
        (["--out", "OUT", "--model", "m", "--url", "x"], "give either --model"),
        (["--out", "OUT", "--url", "x", "--server-args", "-x"], "--server-args: for a server that"),
        (
            ["--out", "OUT", "--url", "x", "--task", "sqad"],
            "did you mean 'squad'? Allowed are chat",
        ),
        (
            ["--out", "OUT", "--url", "x", "--task", "squad:passages=a"],
            "'a' is no int (default: 4)",
        ),
        (["--out", "OUT", "--url", "x", "--task", "squad:passages=99"], "give no case"),
        (["--out", "OUT", "--url", "x", "--method", "seams"], "unknown method 'seams'"),
        (["--out", "OUT", "--url", "x", "--data", "/no/such"], "--data /no/such: no such folder"),
        (["--out", "OUT", "--url", "127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    given = [str(tmp_path / "run") if word == "OUT" else word for word in words]
    assert message in sentence("quality", *given)
    assert not (tmp_path / "run" / "records.jsonl").exists() or message.startswith("no answer")
    assert (tmp_path / "run").exists() == message.startswith("no answer")


def test_the_list_names_every_task_and_option() -> None:
    said = call("quality", "--list")
    for task in tasks().values():
        assert f"{task.name}  {task.doc}" in said
        assert all(f"{key}={value}" in said for key, value in task.defaults().items())


def test_it_starts_a_server(
    server: ToyServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, tuple[str, ...], Path]] = []

    class FakeServer:
        start_seconds = 1.0
        url = server.url

        def __init__(self, model: str, *, mode: str, args: tuple[str, ...], log: Path) -> None:
            started.append((mode, tuple(args), log))
            self.log = log

        def __enter__(self) -> "FakeServer":
            self.log.write_text("log")
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(front, "Server", FakeServer)
    words = ["quality", "--model", folder, "--task", TASKS[0], "--cases", 1, "--method", "none"]
    words += ["--server-args", "--dtype float32 --api-key s3cret --chat-template /secret/x"]
    call(*words, "--out", tmp_path / "run")
    ((mode, args, log),) = started
    assert (mode, args[-2:]) == ("kvshare", ("--kvshare-gate", "off"))
    assert args[:4] == ("--dtype", "float32", "--api-key", "s3cret")
    assert not log.parent.exists()
    run = load_run(tmp_path / "run")
    assert run.settings["server"]["flags"][2:6] == ["--api-key", "KEY", "--chat-template", "x"]
    text = "".join(file.read_text() for file in (tmp_path / "run").iterdir())
    assert "secret" not in text
    assert "s3cret" not in text
    # When it fails the log stays, and is named.
    server.lives = 2
    said = call(*words, "--out", tmp_path / "other", code=2)
    assert f"the server's log is {started[1][2]}" in said
    assert started[1][2].read_text() == "log"


# --- errors of several requests at once -----------------------------------------------------------


def test_what_is_told_of_a_group_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    ours = EvalError("one thing to put right")
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [ours, EvalError("another")])])
    with pytest.raises(Exception, match="2"), front.told():
        raise nested
    assert capsys.readouterr().err == "kvshare: one thing to put right\n"
    # A mistake of ours is not hidden behind it.
    with pytest.raises(ExceptionGroup), front.told():
        raise ExceptionGroup("both", [ours, KeyError("x")])


# --- rendering ------------------------------------------------------------------------------------


def test_rendering(folder: Path, tmp_path: Path) -> None:
    renderer = load_renderer(str(folder))
    tokenizer = renderer.tokenizer
    chat = user("What is it?", system="Be kind.")
    text = "<system>\nBe kind.</s>\n<user>\nWhat is it?</s>\n<assistant>\n"
    assert tokenizer.decode(renderer.ids(chat)) == text
    assert renderer.ids(Prompt(text="What is it?")) == tokenizer.encode("What is it?")
    assert all(type(token) is int for token in renderer.ids(chat))
    bare = Renderer(make_tokenizer(tmp_path / "bare", None))
    shown = "system: Be kind.\n\nuser: What is it?\n\nassistant:"
    assert bare.tokenizer.decode(bare.ids(chat)) == shown
    strict = "{{ raise_exception('no system role') }}"
    renderer = Renderer(make_tokenizer(tmp_path / "strict", strict))
    with pytest.raises(EvalError, match="refuses messages of system, user: no system role"):
        renderer.ids(chat)
    with pytest.raises(EvalError, match="no tokenizer at"):
        load_renderer(str(tmp_path / "none"))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
def test_a_passage_has_the_same_tokens_in_history_and_case(
    tmp_path: Path, template: str | None
) -> None:
    renderer = Renderer(make_tokenizer(tmp_path, template))
    task, options = find_task("squad:questions=2")
    group = next(task.groups(DataSource(), 1, options))
    history = _text(group.history[0])
    passages = [part for part in history.split("\n\n") if part.startswith("Document: ")]
    assert len(passages) == 4
    for passage in passages:
        alone = renderer.ids(Prompt(text=passage))
        assert len(alone) > 50
        for prompt in (group.history[0], *(case.prompt for case in group.cases)):
            assert f" {_words(alone)} " in f" {_words(renderer.ids(prompt))} "
    # Without the context they are not there.
    floor = group.cases[0].no_context
    assert floor is not None
    assert _words(renderer.ids(Prompt(text=passages[0]))) not in _words(renderer.ids(floor))


def _text(prompt: Prompt) -> str:
    return "\n\n".join(message.content for message in prompt.messages)


def _words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


# --- the registry ---------------------------------------------------------------------------------


def test_options_are_typed_by_their_defaults() -> None:
    task, options = find_task("squad:passages=5,wording=fluent,ask_variant=true,")
    assert task.name == "squad"
    assert options == {"passages": 5, "wording": "fluent", "ask_variant": True}
    assert type(options["passages"]) is int
    assert find_task("squad") == (task, {})
    assert find_task("squad:ask_variant=0")[1] == {"ask_variant": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown task ''"),
        ("squat:passages=1", "unknown task 'squat': did you mean 'squad'?"),
        ("squad:pasages=1", "unknown option of task squad 'pasages': did you mean 'passages'?"),
        ("squad:pasages=1", "Allowed are passages, questions, wording"),
        ("squad:passages", "option passages of task squad: write passages=VALUE"),
        ("squad:passages=2.5", "option passages of task squad: '2.5' is no int (default: 4)"),
        ("squad:ask_variant=yes", "'yes' is no bool (default: False)"),
    ],
)
def test_what_is_no_task(text: str, message: str) -> None:
    with pytest.raises(EvalError) as caught:
        find_task(text)
    assert message in str(caught.value)


def test_a_task_is_registered_once_and_with_a_metric_that_exists() -> None:
    def make(data: DataSource, seed: int) -> Any: ...

    with pytest.raises(ValueError, match="registered already"):
        register_task("squad", metric="f1", max_new_tokens=1)(make)
    with pytest.raises(ValueError, match="allowed are f1, exact_match"):
        register_task("new", metric="bleu", max_new_tokens=1)
    assert all(task.metric in METRICS for task in tasks().values())
    assert "new" not in tasks()


# --- time left ------------------------------------------------------------------------------------


def test_the_time_left_counts_what_this_start_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Counting(Console(width=200)) as counting:
        counting.add("a", 100, before=90)
        counting.add("b", 10)
        now = 60.0
        counting.advance("a")  # one a minute, 19 to go
        counting.advance("b")  # not again so soon
    assert capsys.readouterr().out == "a: 91 of 110, about 19 min left\n"


def test_messages_are_rendered_in_order(folder: Path) -> None:
    renderer = load_renderer(str(folder))
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    text = renderer.tokenizer.decode(renderer.ids(Prompt(turns)))
    assert text == "<user>\na</s>\n<assistant>\nb</s>\n<user>\nc</s>\n<assistant>\n"
