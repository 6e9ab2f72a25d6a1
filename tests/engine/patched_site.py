"""Copies of the installed SGLang with patches in them, so that the installation stays as it is.

    .venv/bin/python tests/engine/patched_site.py FOLDER

makes an environment in which all patches are applied: FOLDER/bin/python.
"""

from __future__ import annotations

import os
import shutil
import sys
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sglang_kvshare.patching import installation


def stock_site() -> Path:
    """The folder that holds the installed package ``sglang``."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def copy_targets(site: Path) -> installation.Installation:
    """Only the files that patches touch, as they are in the wheel, and what tells the version."""
    stock = stock_site()
    found = installation.find(stock)
    for path in (*found.patches.checksums, "sglang/__init__.py", "sglang/_version.py"):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock / path, site / path)
    return _stock(site)


def copy_package(site: Path, names: Sequence[str]) -> installation.Installation:
    """The whole package, links in place of files, with the named patches in it.

    Patching replaces links by files, so that what they point to is not touched.
    """
    stock = stock_site() / "sglang"
    for folder, _, files in os.walk(stock):
        if Path(folder).name == "__pycache__":
            continue
        here = site / "sglang" / Path(folder).relative_to(stock)
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            (here / name).symlink_to(Path(folder) / name)
    place = _stock(site)
    if names:
        installation.apply(place, names)
    return place


def _stock(site: Path) -> installation.Installation:
    """The tests may run where patches are applied."""
    place = installation.find(site)
    installation.revert(place)
    return place


def environment(folder: Path) -> Path:
    """An environment like that of this Python, in which the patched copy comes first.

    Returns:
        Its Python. Tests start their servers with it, whatever they do with ``PYTHONPATH``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    packages = Path("lib") / f"python3.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(Path(sys.prefix) / packages, folder / packages, dirs_exist_ok=True)
    site = folder / "patched"
    copy_package(site, installation.find(stock_site()).patches.names)
    # Files of this kind are read in the order of their names.
    (folder / packages / "0-patched.pth").write_text(f"{site.resolve()}\n")
    return folder / "bin" / "python"


if __name__ == "__main__":
    print(environment(Path(sys.argv[1])))
