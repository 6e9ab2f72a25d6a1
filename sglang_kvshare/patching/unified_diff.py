"""Unified diffs, read and applied to the byte.

Only what the patches need: existing files are changed, and context must match exactly. A hunk may
have moved, for another patch may have added lines above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """A diff that cannot be read, or that does not fit the file."""


@dataclass(frozen=True)
class Hunk:
    """Lines, with their ends, that take the place of others.

    Attributes:
        start: number of the first old line, from 0.
        old, new: both with the context around the change.
    """

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        return Hunk(self.start, self.new, self.old)


@dataclass(frozen=True)
class FileDiff:
    """What happens to one file; ``path`` is without the ``a/`` and ``b/`` of the diff."""

    path: str
    hunks: tuple[Hunk, ...]


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their ends; only a newline ends one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def parse(diff: bytes) -> list[FileDiff]:
    """Read a diff; text before the first file is ignored.

    Raises:
        DiffError: no file in it, a file that is added, removed or renamed, or a broken hunk.
    """
    lines = split_lines(diff)
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith(b"--- "):
            at += 1
            continue
        path = _path(lines[at], b"--- a/")
        if at + 1 >= len(lines) or _path(lines[at + 1], b"+++ b/") != path:
            raise DiffError(f"{path} is renamed or removed")
        at += 2
        hunks = []
        while at < len(lines) and (head := _HUNK.match(lines[at])):
            hunk, at = _hunk(lines, at + 1, head)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{path} has no hunk")
        files.append(FileDiff(path, tuple(hunks)))
    if not files:
        raise DiffError("there is no file in the diff")
    return files


def _path(line: bytes, mark: bytes) -> str:
    if not line.startswith(mark):
        raise DiffError(f"expected a line that begins with {mark.decode()}, found {line!r}")
    return line[len(mark) :].split(b"\t")[0].strip().decode()


def _hunk(lines: Sequence[bytes], at: int, head: re.Match[bytes]) -> tuple[Hunk, int]:
    start, old_count, new_count = int(head[1]), int(head[2] or 1), int(head[4] or 1)
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        line = lines[at] if at < len(lines) else b""
        kind, text = line[:1], line[1:]
        if kind not in (b" ", b"-", b"+") or not text.endswith(b"\n"):
            raise DiffError(f"a hunk ends at {line!r} before it is whole")
        if kind != b"+":
            old.append(text)
        if kind != b"-":
            new.append(text)
        at += 1
    if (len(old), len(new)) != (old_count, new_count) or not old:
        raise DiffError("a hunk is longer than its head says")
    return Hunk(start - 1, tuple(old), tuple(new)), at


def apply(content: bytes, hunks: Sequence[Hunk], *, reverse: bool = False) -> bytes:
    """The content with all hunks in it, or with all of them taken back.

    Raises:
        DiffError: a hunk's old lines are not there.
    """
    lines = split_lines(content)
    moved = least = 0
    for hunk in hunks:
        if reverse:
            hunk = hunk.reversed()
        # Going back, lines are counted in the old file: what was gone over has moved them.
        place = _nearest(lines, hunk.old, hunk.start + moved, least)
        lines[place : place + len(hunk.old)] = hunk.new
        least = place + len(hunk.new)
        moved = place - hunk.start + (0 if reverse else len(hunk.new) - len(hunk.old))
    return b"".join(lines)


def _nearest(lines: Sequence[bytes], wanted: Sequence[bytes], expected: int, least: int) -> int:
    """Where ``wanted`` begins, not before ``least`` and as close to ``expected`` as can be."""
    last = len(lines) - len(wanted)
    places = range(least, last + 1)
    for place in sorted(places, key=lambda place: abs(place - expected)):
        if list(lines[place : place + len(wanted)]) == list(wanted):
            return place
    raise DiffError(f"the lines around line {expected + 1} are not as expected")
