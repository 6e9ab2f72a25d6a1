"""The patches for one version of SGLang, and the checksum of every state of every file they touch.

A state is the set of patches that are in a file. Patches do not build upon each other: each fits
the stock file whichever others are in it, which is tried for every state when the checksums are
made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import combinations

from sglang_kvshare.patching.unified_diff import Hunk, apply, parse

CHECKSUMS = "checksums.json"
#: Names of patches.
State = frozenset[str]
STOCK: State = frozenset()


@dataclass(frozen=True)
class Patch:
    """One diff.

    Attributes:
        name: what the commands call it: its file's name without number and ending.
        title: the first line of its text.
        hunks: by path, from the folder that holds the package ``sglang``.
    """

    name: str
    title: str
    hunks: Mapping[str, tuple[Hunk, ...]]


@dataclass(frozen=True)
class PatchSet:
    """All patches for one version.

    Attributes:
        version: of SGLang.
        patches: in the order in which they are applied.
        checksums: SHA-256 in hex by path and state.
    """

    version: str
    patches: tuple[Patch, ...]
    checksums: Mapping[str, Mapping[State, str]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(patch.name for patch in self.patches)

    @cached_property
    def _states(self) -> dict[tuple[str, str], State]:
        return {
            (path, digest): state
            for path, states in self.checksums.items()
            for state, digest in states.items()
        }

    def touching(self, path: str) -> State:
        """The patches that change a file."""
        return frozenset(patch.name for patch in self.patches if path in patch.hunks)

    def state_of(self, path: str, content: bytes) -> State | None:
        """Which patches are in a file; ``None`` when its content is not known."""
        return self._states.get((path, sha256(content)))

    def changed(self, path: str, content: bytes, state: State, wanted: State) -> bytes:
        """The file with the patches of ``wanted`` in it instead of those of ``state``.

        Raises:
            DiffError: the content is not that of ``state``.
            ValueError: what came out has not the checksum that is known for it.
        """
        # By way of the stock file, so that every state has one content whatever led to it.
        for patch in reversed(self.patches):
            if patch.name in state:
                content = apply(content, patch.hunks[path], reverse=True)
        content = patched(self.patches, path, content, wanted)
        if self.state_of(path, content) != wanted:
            raise ValueError(f"{path} did not become what it should")
        return content


def patched(patches: Iterable[Patch], path: str, stock: bytes, wanted: State) -> bytes:
    """The stock file with the patches of ``wanted`` in it."""
    for patch in patches:
        if patch.name in wanted:
            stock = apply(stock, patch.hunks[path])
    return stock


def checksums(patches: Iterable[Patch], stock: Mapping[str, bytes]) -> dict[str, dict[State, str]]:
    """Of every state of every file.

    Raises:
        DiffError: a patch does not fit without another one.
    """
    patches = tuple(patches)
    found: dict[str, dict[State, str]] = {}
    for path, content in sorted(stock.items()):
        names = sorted(patch.name for patch in patches if path in patch.hunks)
        states = (
            frozenset(chosen)
            for count in range(len(names) + 1)
            for chosen in combinations(names, count)
        )
        found[path] = {state: sha256(patched(patches, path, content, state)) for state in states}
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- in the package -------------------------------------------------------------------------------


def versions() -> list[str]:
    """The versions of SGLang that there are patches for."""
    prefix = "sglang-"
    folders = (folder.name for folder in files("kvshare_patches").iterdir())
    return sorted(name.removeprefix(prefix) for name in folders if name.startswith(prefix))


def load(version: str) -> PatchSet:
    """The patches for a version that is among :func:`versions`."""
    folder = files("kvshare_patches") / f"sglang-{version}"
    table = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    return PatchSet(version, read_patches(folder), from_json(table))


def read_patches(folder: Traversable) -> tuple[Patch, ...]:
    """Every ``NNNN-name.patch`` of a folder, by number."""
    diffs = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".patch")),
        key=lambda file: file.name,
    )
    return tuple(_patch(file.name, file.read_bytes()) for file in diffs)


def _patch(file_name: str, diff: bytes) -> Patch:
    name = file_name.removesuffix(".patch").split("-", 1)[1]
    title = diff.decode().split("\n", 1)[0].removeprefix("Subject: ")
    return Patch(name, title, {each.path: each.hunks for each in parse(diff)})


def to_json(found: Mapping[str, Mapping[State, str]]) -> dict[str, dict[str, str]]:
    """A state is written as the names of its patches, joined by ``+``; stock's is ``stock``."""
    return {
        path: {"+".join(sorted(state)) or "stock": digest for state, digest in states.items()}
        for path, states in found.items()
    }


def from_json(table: Mapping[str, Mapping[str, str]]) -> dict[str, dict[State, str]]:
    """The other way of :func:`to_json`."""
    return {
        path: {
            STOCK if text == "stock" else frozenset(text.split("+")): digest
            for text, digest in states.items()
        }
        for path, states in table.items()
    }
