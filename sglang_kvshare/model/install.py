"""Making a model folder: fetch, convert, describe, and only then put it in its place."""

import errno
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_kvshare.model import fetch, gguf
from sglang_kvshare.model.checksum import human_size
from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.manifest import (
    MANIFEST,
    find_damage,
    folder_bytes,
    read_manifest,
    write_manifest,
)
from sglang_kvshare.model.progress import Reporter
from sglang_kvshare.model.registry import ModelSource

_LIBRARIES = ("gguf", "numpy", "safetensors", "tokenizers", "torch")


def ensure_model(source: ModelSource, target: Path, reporter: Reporter) -> int:
    """Make `target` a whole folder of the model and return its size in bytes.

    Nothing is done when it is whole already. Everything unfinished lives in `TARGET.partial`
    beside it, from where an interrupted run goes on.
    """
    target = target.expanduser().resolve()
    try:
        if not _is_whole(source, target, reporter):
            _require_libraries()
            with _work_folder(target) as work:
                _require_space(source, work)
                _build(source, target, work, reporter)
        return folder_bytes(target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"The disk of {target} is full: {error}.") from error
        raise ModelError(f"The folder {target} could not be made: {error}.") from error


def _is_whole(source: ModelSource, target: Path, reporter: Reporter) -> bool:
    """Whether there is nothing to do; an error if `target` is something that is not ours."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise ModelError(f"{target} is a file; give a folder that is new or empty.")
    if not any(target.iterdir()):
        return False
    if not (target / MANIFEST).is_file():
        raise ModelError(
            f"{target} holds files that kvshare did not write; give a folder that is new or empty."
        )
    other = read_manifest(target).get("model", source.name)
    if other != source.name:
        raise ModelError(f"{target} holds the model {other!r}; give another folder.")
    with reporter.step(f"Checking {target}", folder_bytes(target)) as advance:
        damage = find_damage(target, source, advance)
    if damage is not None:
        reporter.say(f"{target} is not whole ({damage}): making it again")
    return damage is None


def _build(source: ModelSource, target: Path, work: Path, reporter: Reporter) -> None:
    """Fetch and convert in `work`, then move the result to `target`."""
    file = fetch.fetch_gguf(source, work, reporter)
    made = work / "converted"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    reader = gguf.open_gguf(file)
    with reporter.step(f"Converting {file.name}", len(reader.tensors), "items") as advance:
        gguf.convert(reader, made, on_tensor=advance)
    (made / "README.md").write_text(_readme(source), encoding="utf-8")
    write_manifest(made, source)
    _publish(made, target)
    file.unlink()


def _publish(made: Path, target: Path) -> None:
    """Put the finished folder in its place."""
    if not target.exists():
        made.rename(target)
        return
    # An empty or damaged folder keeps its identity (it may be a mount, or the user's working
    # directory) and whatever else lies in it. The manifest goes first: until the last file has
    # arrived it marks the folder as ours and not whole.
    for path in sorted(made.iterdir(), key=lambda path: path.name != MANIFEST):
        shutil.move(path, target / path.name)
    made.rmdir()


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """`TARGET.partial`, locked against a second run; gone afterwards if nothing is left in it."""
    work = target.with_name(target.name + ".partial")
    work.mkdir(parents=True, exist_ok=True)
    lock = work / "lock"
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"Another run is making {target} at this moment.") from error
        try:
            yield work
        finally:
            lock.unlink()
            # After an error the folder stays if it holds something that the next run resumes.
            with suppress(OSError):
                work.rmdir()


def _require_libraries() -> None:
    """Say what is missing before the download and not after it."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"The conversion needs {', '.join(missing)}: pip install 'sglang-kvshare[model]'"
        )


def _require_space(source: ModelSource, work: Path) -> None:
    """Everything lies on the disk at once for a moment, less what an earlier run left."""
    there = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    need = source.wheel_bytes + source.gguf_bytes + source.folder_bytes - there
    free = shutil.disk_usage(work).free
    if free < need:
        raise ModelError(
            f"{source.name} needs {human_size(need)} of free space beside the target; "
            f"{os.fspath(work.parent)} has {human_size(free)}."
        )


def _readme(source: ModelSource) -> str:
    return f"""# {source.name}

This folder holds the model {source.upstream}
(licence: {source.licence}) in the layout that Hugging Face transformers and SGLang read.

It was made on this machine by `kvshare model {source.name}`, which converted the file
`{source.member}`
of the Python package `{source.requirement}` from GGUF. That file is quantised, so these weights
are close to the published ones but not equal to them. Nothing else was changed.
`{MANIFEST}` lists the checksums of the source and of every file here.
"""
