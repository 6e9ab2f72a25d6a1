"""The manifest of a finished model folder, by which a later run knows that it is whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_kvshare import __version__
from sglang_kvshare.model.checksum import human_size, sha256_file
from sglang_kvshare.model.registry import ModelSource

MANIFEST = "kvshare-model.json"
CONVERTER_VERSION = 1
"""Raise it when the files made from the same GGUF change: older folders are then made again."""


def write_manifest(folder: Path, source: ModelSource) -> None:
    """Describe every file that is in `folder` now; call it when all of them are written."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    content = {
        "model": source.name,
        "upstream": source.upstream,
        "licence": source.licence,
        "source": _source_pin(source),
        "converter": CONVERTER_VERSION,
        "made_by": f"sglang-kvshare {__version__}",
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; empty if it cannot be read as one."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def folder_bytes(folder: Path) -> int:
    """The size of the files that the manifest lists; 0 if it cannot be read."""
    return sum(int(entry["bytes"]) for entry in read_manifest(folder).get("files", {}).values())


def find_damage(
    folder: Path, source: ModelSource, on_bytes: Callable[[int], None] | None = None
) -> str | None:
    """What is wrong with the folder, in a few words; None when it is whole.

    Sizes are compared first, for all files, because a missing or cut file shows at once.
    """
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        return f"{MANIFEST} cannot be read"
    if manifest.get("converter") != CONVERTER_VERSION or manifest.get("source") != _source_pin(
        source
    ):
        return "another version of kvshare made it"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            size = human_size(path.stat().st_size)
            return f"{name} has {size} instead of {human_size(entry['bytes'])}"
    for name, entry in files.items():
        if sha256_file(folder / name, on_bytes) != entry["sha256"]:
            return f"{name} has another checksum"
    return None


def _source_pin(source: ModelSource) -> dict[str, str]:
    return {
        "package": source.package,
        "version": source.version,
        "wheel_sha256": source.wheel_sha256,
        "member": source.member,
        "gguf_sha256": source.gguf_sha256,
    }
