"""`kvshare patch status|apply|revert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_kvshare.patching.installation import (
    IN,
    OUT,
    Installation,
    PatchError,
    apply,
    examine,
    find,
    revert,
)

app = typer.Typer(
    name="patch",
    help="Optional source patches to the installed SGLang: see them, apply them, take them out.",
    no_args_is_help=True,
)

_Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Patches; without any, all.")
]
_Site = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder that holds the package sglang; by default the one that this Python "
        "imports from.",
        show_default=False,
    ),
]


@app.command("status")
def status(
    site: _Site = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which patches are applied.

    Exit code 1 when a file is not known, a patch is in some of its files only, or there are no
    patches for this SGLang.
    """
    installation = _found(site)
    try:
        findings = examine(installation)
    except PatchError as error:
        raise _refused(error) from None
    if as_json:
        states = {each.patch.name: each.state for each in findings}
        version = installation.patches.version
        table = {"sglang": version, "site": str(installation.site), "patches": states}
        typer.echo(json.dumps(table, indent=2))
    else:
        typer.echo(f"SGLang {installation.patches.version} in {installation.site}")
        for each in findings:
            typer.echo(f"  {each.patch.name:27} {each.state:15} {each.patch.title}")
            for path in each.paths:
                typer.echo(f"    {path}")
    if any(each.state not in (IN, OUT) for each in findings):
        raise typer.Exit(1)


@app.command("apply")
def apply_command(names: _Names = None, site: _Site = None) -> None:
    """Put patches into the installed SGLang; servers that run need a restart.

    Every file is checked first. All of them are changed, or none.
    """
    installation = _found(site)
    try:
        done = apply(installation, names or ())
    except PatchError as error:
        raise _refused(error) from None
    _say("applied", done)


@app.command("revert")
def revert_command(names: _Names = None, site: _Site = None) -> None:
    """Take patches out again: the files are to the byte what they were.

    Also mends a patch that an interruption left in some of its files only.
    """
    installation = _found(site)
    try:
        done = revert(installation, names or ())
    except PatchError as error:
        raise _refused(error) from None
    _say("reverted", done)


def _found(site: Path | None) -> Installation:
    try:
        return find(site)
    except PatchError as error:
        raise _refused(error) from None


def _refused(error: PatchError) -> typer.Exit:
    typer.echo(f"kvshare: {error}", err=True)
    return typer.Exit(1)


def _say(done: str, names: list[str]) -> None:
    typer.echo(f"{done}: {', '.join(names)}" if names else "nothing to do")
