"""An installed SGLang, looked at and patched.

Every file is known by its checksum before anything is written. What is not known is left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sglang_kvshare.patching.patch_set import Patch, PatchSet, State, load, versions
from sglang_kvshare.patching.whole_files import remove_leftovers, replace_all

IN, OUT, PARTLY, UNKNOWN = "applied", "not applied", "partly applied", "unknown file"


class PatchError(RuntimeError):
    """Why nothing was changed, in one plain sentence."""


@dataclass(frozen=True)
class Finding:
    """How one patch stands.

    Attributes:
        state: ``applied``, ``not applied``, ``partly applied`` or ``unknown file``.
        paths: the files that make it the third or the fourth: those in which it is, or those that
            no state of the patches explains.
    """

    patch: Patch
    state: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Installation:
    """The folder that holds the package ``sglang``, and the patches for its version."""

    site: Path
    patches: PatchSet


def find(site: Path | None = None) -> Installation:
    """The SGLang in ``site``, or the one that this Python would import.

    Raises:
        PatchError: there is none, or none of a version that there are patches for.
    """
    if site is None:
        spec = find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("SGLang is not installed here; --site names the folder that holds it")
        site = Path(next(iter(spec.submodule_search_locations))).parent
    if not (site / "sglang" / "__init__.py").is_file():
        raise PatchError(f"there is no package sglang in {site}")
    version = _version(site / "sglang")
    if version not in versions():
        raise PatchError(
            f"the SGLang in {site} is {version or 'of an unknown version'}; "
            f"there are patches for {', '.join(versions())}"
        )
    return Installation(site, load(version))


def _version(package: Path) -> str:
    try:
        text = (package / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def examine(installation: Installation) -> list[Finding]:
    """How each patch stands, in their order."""
    patches = installation.patches
    states = {
        path: patches.state_of(path, content) for path, content in _contents(installation).items()
    }
    return [_finding(patch, states) for patch in patches.patches]


def apply(installation: Installation, names: Sequence[str] = ()) -> list[str]:
    """Put patches in; all of them unless some are named.

    Returns:
        The names of those that were not in before.

    Raises:
        PatchError: nothing has changed.
    """
    return _change(installation, names, put_in=True)


def revert(installation: Installation, names: Sequence[str] = ()) -> list[str]:
    """Take patches out, also one that is in some of its files only; all unless some are named.

    Returns:
        The names of those that were in before.

    Raises:
        PatchError: nothing has changed.
    """
    return _change(installation, names, put_in=False)


def _change(installation: Installation, names: Sequence[str], *, put_in: bool) -> list[str]:
    patches = installation.patches
    if unknown := [name for name in names if name not in patches.names]:
        raise PatchError(f"there is no patch {unknown[0]}; there are {', '.join(patches.names)}")
    wanted = frozenset(names or patches.names)
    with _alone(installation):
        contents = _contents(installation)
        states = {path: patches.state_of(path, content) for path, content in contents.items()}
        findings = [_finding(each, states) for each in patches.patches if each.name in wanted]
        for finding in findings:
            _refuse(installation, finding, put_in)
        changes = {}
        for path, state in states.items():
            mine = wanted & patches.touching(path)
            if state is None or not mine:
                continue
            becomes = state | mine if put_in else state - mine
            if becomes != state:
                content = patches.changed(path, contents[path], state, becomes)
                changes[installation.site / path] = content
        _check_writable(changes)
        try:
            replace_all(changes)
        except OSError as error:
            raise PatchError(f"nothing was changed: {error}") from error
    stands = IN if put_in else OUT
    return [finding.patch.name for finding in findings if finding.state != stands]


def _contents(installation: Installation) -> dict[str, bytes]:
    """Of every file that a patch touches; a missing one is empty, which no file is."""
    found = {}
    for path in installation.patches.checksums:
        try:
            found[path] = (installation.site / path).read_bytes()
        except FileNotFoundError:
            found[path] = b""
        except OSError as error:
            raise PatchError(f"nothing was changed: {error}") from error
    return found


def _finding(patch: Patch, states: Mapping[str, State | None]) -> Finding:
    mine = {path: states[path] for path in patch.hunks}
    if unknown := tuple(path for path, state in mine.items() if state is None):
        return Finding(patch, UNKNOWN, unknown)
    inside = tuple(path for path, state in mine.items() if state and patch.name in state)
    if not inside:
        return Finding(patch, OUT)
    return Finding(patch, IN) if len(inside) == len(mine) else Finding(patch, PARTLY, inside)


def _refuse(installation: Installation, finding: Finding, put_in: bool) -> None:
    name = finding.patch.name
    if finding.state == UNKNOWN:
        raise PatchError(
            f"nothing was changed: {installation.site / finding.paths[0]} is not the file of "
            f"SGLang {installation.patches.version}, with or without these patches (needed for "
            f"{name})"
        )
    if finding.state == PARTLY and put_in:
        raise PatchError(
            f"nothing was changed: {name} is in {', '.join(finding.paths)} only, as after an "
            f"interruption; `kvshare patch revert {name}` takes it out"
        )


def _check_writable(changes: Mapping[Path, bytes]) -> None:
    for path in changes:
        # Root may write to everything, but a file without a write bit was closed on purpose.
        closed = not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK)
        if closed or not os.access(path.parent, os.W_OK | os.X_OK):
            raise PatchError(f"nothing was changed: {path} is read-only")


@contextmanager
def _alone(installation: Installation) -> Iterator[None]:
    """One command at a time in one installation."""
    package = installation.site / "sglang"
    handle = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another command is at work in {package}") from None
        for path in installation.patches.checksums:
            remove_leftovers((installation.site / path).parent)
        yield
    finally:
        os.close(handle)
