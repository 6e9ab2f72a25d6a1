"""Finding a data set, and reading its files, plain or ``.gz``."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders.source import DataSource

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class HubSet:
    """Where a data set is on the hub.

    Attributes:
        path: ``owner/name``.
        split: the part that is read.
        config: which of its variants, where it has several.
    """

    path: str
    split: str
    config: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set and where it can be.

    Attributes:
        name: what errors call it.
        files: accepted file names below the folder, the preferred first; each also as ``.gz``.
        hub: its place on the hub, if it is there in a form that is read.
    """

    name: str
    files: tuple[str, ...]
    hub: HubSet | None = None

    def find(self, source: DataSource) -> Path | HubSet | None:
        """Where to read it: the folder first, then the hub; ``None`` if neither is given.

        Raises:
            EvalError: it is in none of the places that are given.
        """
        if source.folder is not None:
            if not source.folder.is_dir():
                raise EvalError(f"the data folder {source.folder} is not there")
            for name in self.files:
                for path in (source.folder / name, source.folder / f"{name}.gz"):
                    if path.is_file():
                        return path
        if source.hub and self.hub is not None:
            return self.hub
        if source.folder is None and not source.hub:
            return None
        place = "the hub" if source.folder is None else str(source.folder)
        raise EvalError(f"data set {self.name} is not in {place}: {self.accepted()}")

    def accepted(self) -> str:
        """What would be found, for errors."""
        files = f"accepted are the files {', '.join(self.files)} (also .gz) in a data folder"
        return f"{files}, or {self.hub.path} from the hub" if self.hub else f"{files}; no hub name"


def read_json(path: Path) -> Any:
    """The whole content of a JSON file."""
    with _open(path) as file:
        try:
            return json.load(file)
        except json.JSONDecodeError as error:
            raise EvalError(f"{path.name} is not valid JSON: {error}") from None


def read_jsonl(path: Path) -> Iterator[Any]:
    """The lines of a JSONL file, one value each."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise EvalError(f"{path.name}:{number} is not valid JSON: {error}") from None


def read_csv(path: Path) -> Iterator[Row]:
    """The rows of a CSV file with a header."""
    with _open(path) as file:
        yield from csv.DictReader(file)


def parsed(make: Callable[[Any], T], row: Any, where: str) -> T:
    """``make(row)``, with one sentence for a row that has another shape.

    Raises:
        EvalError: a field is missing or of another type; ``where`` names the row.
    """
    try:
        return make(row)
    except KeyError as error:
        raise EvalError(f"{where}: field {error} is missing") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise EvalError(f"{where}: not in the expected format: {error}") from None


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    unpack = gzip.open if path.suffix == ".gz" else open
    try:
        with unpack(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield cast(TextIO, file)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise EvalError(f"{path.name} cannot be read: {error}") from None
