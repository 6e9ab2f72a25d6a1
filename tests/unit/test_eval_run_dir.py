"""Run directories: what is shown of a command line, what is written, and how a run goes on."""

import gzip
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshare_eval.command_line import plain_command, plain_words
from kvshare_eval.errors import EvalError
from kvshare_eval.run_dir import RunDir, load_run

pytestmark = pytest.mark.unit

SETTINGS: dict[str, Any] = {"model": "tiny", "cases": 3, "tasks": ["squad"]}


def make(path: Path, resume: bool = False, kind: str = "quality", **settings: Any) -> RunDir:
    return RunDir(
        path, kind=kind, command="kvshare", settings={**SETTINGS, **settings}, resume=resume
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--model", "/a/secret/b"], "--model b"),
        (["--model=/a/secret/b/"], "--model=b"),
        (["--model", "/home/secret name/b"], "--model b"),
        (["--model", "~/secret/b"], "--model b"),
        (["--out", "../../secret/b"], "--out b"),
        (
            ["--server-args", "--x /secret/b --api-key secret"],
            "--server-args '--x b --api-key KEY'",
        ),
        (["--server-args=--x /secret/b --api-key secret"], "'--server-args=--x b --api-key KEY'"),
        (["--server-args", "--api-key 'secret secret' -x"], "--server-args '--api-key KEY -x'"),
        (["--server-args", "--api-key=secret -x"], "--server-args '--api-key=KEY -x'"),
        (["--server-args", "-x it's /a/secret/b"], """--server-args '-x it'"'"'s b'"""),
        (["--api-key", "secret", "--seed", "2"], "--api-key KEY --seed 2"),
        (["--api-key=secret"], "--api-key=KEY"),
        (["--api-k", "secret"], "--api-k KEY"),
        (["--admin-api-key", "secret"], "--admin-api-key KEY"),
        (["--url", "http://secret:30000/v1"], "--url URL"),
        (["--url", "secret:30000"], "--url URL"),
        (["--url=secret"], "--url=URL"),
        (["--url", "stock=http://user:secret@h:1"], "--url stock=URL"),
        (["see", "https://secret/x"], "see URL"),
        (["--host", "10.1.2.secret"], "--host HOST"),
        (["--chat-template=/a/secret/b.jinja"], "--chat-template=b.jinja"),
        (["a=/secret/x,b=/secret/y/z"], "a=x,b=z"),
        (['{"path":"/a/secret/b","other":"http://secret/"}'], '{"path":"b","other":"URL"}'),
    ],
)
def test_no_path_address_or_key_is_shown(words: list[str], shown: str) -> None:
    assert "secret" not in plain_command(words)
    assert plain_command(words) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["kvshare", "eval", "quality", "--seed", "3", "--no-answers"],
        ["--model", "owner/model-0.5B", "--method", "seams@0.2"],
        ["--task", "squad:passages=4,questions=1", "--rates", "closed,0.5"],
        ["1/2", "a/b", "--", "x=y", ""],
    ],
)
def test_everything_else_is_shown_as_it_is(words: list[str]) -> None:
    assert plain_command(words) == " ".join(words)
    assert plain_words(words) == words


@given(
    st.lists(
        st.sampled_from(
            [
                ["--api-key", "s3cret"],
                ["--api-key=s3cret"],
                ["--model", "/s3cret/m"],
                ["--model=/s3cret/m"],
                ["--url", "http://s3cret:1"],
                ["--url", "s3cret"],
                ["--x"],
                ["y"],
            ]
        ),
        max_size=5,
    ),
    st.booleans(),
)
def test_nothing_is_shown_in_any_order(given_: list[list[str]], in_one_word: bool) -> None:
    words = [word for each in given_ for word in each]
    if in_one_word:
        words = ["--server-args", " ".join(words)]
    assert "s3cret" not in plain_command(words)
    assert len(plain_words(words)) == len(words)


def test_a_folder_that_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret" / "model").mkdir(parents=True)
    assert plain_command(["secret/model"]) == "secret/model"  # may be a hub name
    monkeypatch.chdir(tmp_path)
    assert plain_command(["secret/model"]) == "model"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [{"key": "a", "text": "café \u2028 \n"}, {"key": "b", "n": 1.5}, {"key": "a", "n": 2}]
    with make(tmp_path / "deep" / "run") as run:
        for record in records:
            run.append(record)
        assert run.done == {"a", "b"}
        assert load_run(run.path).records == (records[2], records[1])  # while it is open
    read = load_run(tmp_path / "deep" / "run")
    assert (read.name, read.kind, read.settings) == ("run", "quality", SETTINGS)
    assert read.facts["command"] == "kvshare"
    text = "".join(file.read_text() for file in read_folder(tmp_path / "deep" / "run"))
    assert str(tmp_path) not in text
    host = socket.gethostname()
    assert len(host) < 4 or host not in text
    with pytest.raises(RuntimeError, match="not open"):
        run.append({"key": "c"})


def read_folder(path: Path) -> list[Path]:
    found = sorted(path.iterdir())
    assert {file.name for file in found} <= {"run.json", "records.jsonl", "resumed.json"}
    return found


RECORDS = [{"key": "a", "t": "é"}, {"key": "b", "t": "漢字"}, {"key": "c", "t": "x"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, len(LINES)))
def test_it_goes_on_wherever_it_was_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("run")
    with make(path):
        pass
    (path / "records.jsonl").write_bytes(LINES[:cut])
    whole = LINES[:cut].count(b"\n")
    assert load_run(path).records == tuple(RECORDS[:whole])
    with make(path, resume=True) as run:
        assert run.done == {record["key"] for record in RECORDS[:whole]}
        for record in RECORDS[whole:]:
            run.append(record)
    assert (path / "records.jsonl").read_bytes() == LINES
    assert len(json.loads((path / "resumed.json").read_text())) == 1


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        run.append(RECORDS[0])
    with pytest.raises(EvalError, match="holds a run already; --resume goes on with it"):
        make(tmp_path / "run")
    # One that has measured nothing yet starts anew, with whatever settings.
    with make(tmp_path / "empty"):
        pass
    with make(tmp_path / "empty", cases=9) as run:
        run.append(RECORDS[0])
    assert load_run(tmp_path / "empty").settings["cases"] == 9
    assert not (tmp_path / "empty" / "resumed.json").exists()
    # Nothing to go on with is no mistake: the same command line serves every start.
    with make(tmp_path / "new", resume=True) as run:
        assert run.done == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cases": 4}, "was made with cases=3, not 4"),
        ({"cases": 4, "model": "big"}, "was made with cases=3, not 4"),
        ({"more": 1}, "was made with more=None, not 1"),
        ({"tasks": ("squad", "chat")}, r"was made with tasks=\['squad'\], not \['squad', 'chat'\]"),
        ({"kind": "serving"}, "holds a quality run, not a serving run"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with make(tmp_path) as run:
        run.append(RECORDS[0])
    before = sorted((file.name, file.read_bytes()) for file in tmp_path.iterdir())
    with pytest.raises(EvalError, match=message):
        make(tmp_path, resume=True, **change)
    assert sorted((file.name, file.read_bytes()) for file in tmp_path.iterdir()) == before
    with make(tmp_path, resume=True, tasks=("squad",)):  # a tuple is a list in JSON
        pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.append(RECORDS[0])
        with pytest.raises(EvalError, match="another process is writing"):
            make(tmp_path, resume=True).__enter__()
        assert not (tmp_path / "resumed.json").exists()
    with make(tmp_path, resume=True) as run:
        assert run.done == {"a"}


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for path, message in (
        (tmp_path / "file", "is not empty and holds no run"),
        (tmp_path / "full", "is not empty and holds no run"),
        (tmp_path / "file" / "below", "cannot be made"),
    ):
        with pytest.raises(EvalError, match=message):
            make(path)
        with pytest.raises(EvalError, match=r"holds no run: run.json is missing"):
            load_run(path)
    (tmp_path / "full" / "run.json").write_text('{"format": 0}')
    with pytest.raises(EvalError, match="format 0, but this version reads 1"):
        load_run(tmp_path / "full")
    (tmp_path / "full" / "run.json").write_text("{")
    with pytest.raises(EvalError, match=r"run.json is not valid JSON"):
        load_run(tmp_path / "full")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    with make(tmp_path):
        pass
    (tmp_path / "records.jsonl").write_bytes(b'{"key": "a"}\n{"key"\n{"key": "c"}\n')
    with pytest.raises(EvalError, match=r"records.jsonl:2 is not valid JSON"):
        load_run(tmp_path)


def test_a_run_may_grow_where_that_is_allowed(tmp_path):
    def make(resume=True, **settings):
        return RunDir(
            tmp_path / "run",
            kind="quality",
            command="kvshare",
            settings=settings,
            resume=resume,
            may_grow=("cases", "methods"),
        )

    with make(resume=False, cases=2, methods=["full"], seed=1) as run:
        run.append({"key": "a"})
    with make(cases=3, methods=["full", "none"], seed=1) as run:
        assert run.done == {"a"}
    assert load_run(tmp_path / "run").settings["cases"] == 3
    for shrunk, name in (
        ({"cases": 2, "methods": ["full", "none"], "seed": 1}, "cases=3"),
        ({"cases": 3, "methods": ["none"], "seed": 1}, "methods"),
        ({"cases": 3, "methods": ["full", "none"], "seed": 2}, "seed=1"),
    ):
        with pytest.raises(EvalError, match=name):
            make(**shrunk)


def test_a_packed_run_is_read_and_goes_on(tmp_path):
    path = tmp_path / "run"
    made = {"kind": "quality", "command": "kvshare", "settings": {"seed": 1}}
    with RunDir(path, **made) as run:
        run.append({"key": "a", "value": "ü"})
    plain = load_run(path).records
    records = path / "records.jsonl"
    (path / "records.jsonl.gz").write_bytes(gzip.compress(records.read_bytes()))
    records.unlink()
    assert load_run(path).records == plain
    with pytest.raises(EvalError, match="holds a run already"):
        RunDir(path, **made)
    with RunDir(path, **made, resume=True) as run:
        assert run.done == {"a"}
        run.append({"key": "b"})
    assert [each["key"] for each in load_run(path).records] == ["a", "b"]
    assert not (path / "records.jsonl.gz").exists()
