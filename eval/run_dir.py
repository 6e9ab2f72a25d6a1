"""A run directory: what ran, where, and one line for every request.

    RUN/
      run.json         command, settings, versions, commit, machine; written once, at the start
      records.jsonl    one record a line, appended as it is measured, each with its own ``key``;
                       a run that is kept may have it packed, as records.jsonl.gz
      resumed.json     commit and time of every later start of the same run, if any

A record is written once and never changed, so that a run that was stopped goes on where it was. The
directory holds no path, no host name and no key of the machine that made it: it can be sent away.
"""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from kvshare_eval.errors import EvalError
from kvshare_eval.machine import machine_facts

_RUN = "run.json"
_RECORDS = "records.jsonl"
_RESUMED = "resumed.json"
#: Raised when a record's shape changes, so that a report can say what it cannot read.
FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A run as a report reads it.

    Attributes:
        name: the folder's name.
        kind: ``quality`` or ``serving``.
        facts: the content of ``run.json``.
        records: all records, in the order they were written, the last of each key only.
    """

    name: str
    kind: str
    facts: dict[str, Any]
    records: tuple[dict[str, Any], ...]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.facts["settings"])


class RunDir:
    """A run directory that is being written; a context manager.

    Args:
        path: the folder to make, or to go on with.
        kind: ``quality`` or ``serving``.
        command: the command line, without paths (see :mod:`kvshare_eval.command_line`).
        settings: everything that decides what is measured; a run is resumed with the same only.
        resume: go on with a run that is there.
        may_grow: settings that may ask for more when a run is resumed: a larger number, or further
            items of a list.

    Raises:
        EvalError: the folder holds records and ``resume`` is not set, or a run with other settings;
            the message names the first that differs.
    """

    def __init__(
        self,
        path: Path,
        *,
        kind: str,
        command: str,
        settings: Mapping[str, Any],
        resume: bool = False,
        may_grow: Sequence[str] = (),
    ) -> None:
        self.path = path
        self._file: TextIO | None = None
        #: ``run.json`` as it is to be when a run goes on; ``None`` for a new one.
        self._facts: dict[str, Any] | None = None
        self.done: set[str] = set()
        plain = json.loads(json.dumps(dict(settings)))
        before = load_run(path) if (path / _RUN).exists() else None
        if before is not None and (resume or before.records):
            if not resume:
                raise EvalError(f"{path} holds a run already; --resume goes on with it")
            _same(before, kind, plain, path, may_grow)
            self.done = {record["key"] for record in before.records}
            self._facts = {**before.facts, "settings": plain}
        elif before is None and path.exists() and not _is_empty(path):
            raise EvalError(f"{path} is not empty and holds no run")
        else:
            _make(path)
            facts = {
                "format": FORMAT,
                "kind": kind,
                "command": command,
                "settings": plain,
                "started": _now(),
                **machine_facts(),
            }
            _write(path / _RUN, facts)

    def __enter__(self) -> Self:
        records = self.path / _RECORDS
        if self._facts is not None and not records.exists():
            _unpack(records)
        file = records.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise EvalError(f"{self.path}: another process is writing this run") from None
        _drop_torn_line(records)
        if self._facts is not None:
            _write(self.path / _RUN, self._facts)
            _note_resumed(self.path)
        self._file = file
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, which has a ``key``; it is on its way to the disk when this returns."""
        if self._file is None:
            raise RuntimeError("the run is not open")
        self._file.write(json.dumps(dict(record), ensure_ascii=False) + "\n")
        self._file.flush()
        self.done.add(str(record["key"]))


def load_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        EvalError: no run there, or one of another format.
    """
    try:
        facts = json.loads((path / _RUN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise EvalError(f"{path} holds no run: {_RUN} is missing") from None
    except json.JSONDecodeError as error:
        raise EvalError(f"{path / _RUN} is not valid JSON: {error}") from None
    if facts.get("format") != FORMAT:
        raise EvalError(f"{path}: format {facts.get('format')!r}, but this version reads {FORMAT}")
    by_key = {record["key"]: record for record in _records(path / _RECORDS)}
    return Run(path.name, facts["kind"], facts, tuple(by_key.values()))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        return
    # Bytes: a line may be torn in the middle of a character.
    with path.open("rb") if path.exists() else gzip.open(packed, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # torn off: the process was stopped while it wrote this line
            try:
                yield json.loads(line)
            except ValueError as error:
                raise EvalError(f"{path}:{number} is not valid JSON: {error}") from None


def _unpack(records: Path) -> None:
    """Unpack the records of a run that was kept and goes on."""
    packed = records.with_name(records.name + ".gz")
    if packed.exists():
        records.write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()


def _is_empty(path: Path) -> bool:
    """A folder in which nothing was written, or only the start of it."""
    if not path.is_dir():
        return False
    return all(each.name == Path(_RUN).with_suffix(".part").name for each in path.iterdir())


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvalError(f"{path} cannot be made: {error.strerror}") from None


def _drop_torn_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def _same(
    before: Run, kind: str, settings: dict[str, Any], path: Path, may_grow: Sequence[str]
) -> None:
    if before.kind != kind:
        raise EvalError(f"{path} holds a {before.kind} run, not a {kind} run")
    for key in sorted({*before.settings, *settings}):
        old, new = before.settings.get(key), settings.get(key)
        if old != new and not (key in may_grow and _grown(old, new)):
            raise EvalError(
                f"{path} was made with {key}={old!r}, not {new!r}: resume it with the same settings"
            )


def _grown(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return all(item in new for item in old)
    return bool(new > old)


def _note_resumed(path: Path) -> None:
    file = path / _RESUMED
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    _write(file, [*earlier, {"resumed": _now(), "commit": machine_facts()["commit"]}])


def _write(path: Path, content: Any) -> None:
    """All of it or nothing, whenever the process is stopped."""
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    whole.replace(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
