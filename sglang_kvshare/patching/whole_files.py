"""Writing several files so that all of them are new, or none.

Each file is replaced by renaming, so that a reader sees the old one or the new one and never a
part. What can fail (no space, no permission) fails before the first renaming; what interrupts the
renamings themselves takes those back that were done. Only a process that is killed between two
renamings leaves some files new and others old, each of them whole.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PREFIX = ".kvshare-patch-"


def replace_all(contents: Mapping[Path, bytes]) -> None:
    """Give each file its new content and leave its mode and owner as they are.

    A link becomes a file, and what it pointed to stays as it is: package managers share files
    between environments.

    Raises:
        OSError: nothing has changed.
    """
    made: list[Path] = []
    staged: list[tuple[Path, Path, Path]] = []
    replaced: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            new, old = (_beside(path, what, made) for what in (content, path.read_bytes()))
            staged.append((path, new, old))
        try:
            for path, new, old in staged:
                replaced.append((path, old))
                os.replace(new, path)
        except BaseException:
            for path, old in reversed(replaced):
                os.replace(old, path)
            raise
        for folder in {path.parent for path in contents}:
            _sync(folder)
    finally:
        for path in made:
            with suppress(FileNotFoundError):
                path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process had not yet renamed."""
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):
            path.unlink()


def _beside(path: Path, content: bytes, made: list[Path]) -> Path:
    about = path.stat()
    handle, name = tempfile.mkstemp(prefix=PREFIX, dir=path.parent)
    made.append(Path(name))
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        if (about.st_uid, about.st_gid) != (os.geteuid(), os.getegid()):
            # Only root can keep another one's.
            with suppress(PermissionError):
                os.fchown(handle, about.st_uid, about.st_gid)
        os.fchmod(handle, stat.S_IMODE(about.st_mode))
        os.fsync(handle)
    return made[-1]


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
