"""`kvshare publish`: passages that all tenants of a server may reuse.

A passage is sent as a prompt of its own, and whole, so that its values depend on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_kvshare.config import ENV_OPERATOR_KEY

if TYPE_CHECKING:
    # It needs numpy, and the command starts without.
    from sglang_kvshare.verify.client import Client


class PublishError(RuntimeError):
    """Why nothing more was published, in one plain sentence."""


@dataclass(frozen=True)
class Passage:
    """One text and where it came from."""

    name: str
    text: str


def passages_in(files: Iterable[Path]) -> Iterator[Passage]:
    """One a file, or one a line of a ``.jsonl`` file, each ``{"text": ...}``.

    Raises:
        PublishError: a file that cannot be read, a line that is no such object, an empty text.
    """
    for path in files:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PublishError(f"{path} cannot be read: {error}") from error
        if path.suffix != ".jsonl":
            yield _named(str(path), content)
            continue
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield _named(f"{path}:{number}", _text(f"{path}:{number}", line))


def _text(name: str, line: str) -> Any:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise PublishError(f'{name}: expected an object with a text, {{"text": "..."}}') from error


def _named(name: str, text: Any) -> Passage:
    if not isinstance(text, str) or not text.strip():
        raise PublishError(f"{name}: the text is empty, or no text")
    return Passage(name, text)


def publish(client: Client, passage: Passage) -> int:
    """Have the server compute a passage and keep it for all tenants.

    Returns:
        its tokens.

    Raises:
        PublishError: the server tells no tenants apart, or the key is not an operator's, or the
            passage does not fit.
    """
    from sglang_kvshare.request import PARAMS_KEY, PUBLIC
    from sglang_kvshare.verify.client import VerifyError

    body = {
        "text": passage.text,
        "sampling_params": {
            "max_new_tokens": 0,
            "custom_params": {PARAMS_KEY: {"publish_as": PUBLIC}},
        },
    }
    try:
        meta = client.post("/generate", body)["meta_info"]
    except VerifyError as error:
        raise PublishError(f"{passage.name}: {error}") from error
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise PublishError(f"{passage.name}: {meta['finish_reason'].get('message')}")
    if PARAMS_KEY not in (meta.get("cached_tokens_details") or {}):
        raise PublishError(
            f"{client.url} runs SGLang without KVShare: the passage was computed for nobody"
        )
    return int(meta["prompt_tokens"])


def command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help='A passage each; .jsonl: {"text": ...} a line.'),
    ],
    url: Annotated[str, typer.Option(help="The server, as http://host:port.")],
    key: Annotated[
        str,
        typer.Option(
            envvar=ENV_OPERATOR_KEY,
            show_envvar=True,
            help="One of the tenants file's operator_keys (the key, not its digest).",
        ),
    ],
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for each passage.")
    ] = 600,
) -> None:
    """Publish passages for all tenants of a server (see docs/tenants.md).

    They serve until they are evicted or the cache is flushed: publish again after a restart.
    """
    from sglang_kvshare.verify.client import Client

    client = Client(url, key, timeout)
    count = total = 0
    try:
        # All are read before the first is sent: what is wrong with one is known at once.
        for passage in list(passages_in(files)):
            tokens = publish(client, passage)
            typer.echo(f"{passage.name}  {tokens} tokens")
            count, total = count + 1, total + tokens
    except PublishError as error:
        typer.echo(f"kvshare: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"published {count} passages, {total} tokens")
