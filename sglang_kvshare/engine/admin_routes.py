"""The operator's routes under ``/kvshare/``, beside SGLang's own.

Seams: ``http_server.app`` (a FastAPI application), ``http_server.get_global_state``,
``sglang.srt.utils.auth.auth_level`` and ``AuthLevel``,
``TokenizerManager.auto_create_handle_loop`` and ``get_internal_state_communicator``.

They are protected as ``/flush_cache`` is: by the admin key if there is one, else by the API key,
and not at all on a server without keys. With tenants an admin key is asked for in any case: their
own keys, or none, must not show one what others have cached.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response

from sglang_kvshare.engine.activation import active_config
from sglang_kvshare.treeview import FORMATS, TreePicture, render

#: Nodes of a picture: by default, and at most.
NODES, MOST_NODES = 2000, 20_000
#: Seconds until a scheduler that does not answer is given up.
PATIENCE_S = 60.0
#: Of this process, and so of all that it asks: a namespace keeps its digest, and no digest can be
#: computed from a guessed salt.
_DIGEST_KEY = secrets.token_hex(16)
_TREE, _FORGET = "/kvshare/tree", "/kvshare/forget"
#: A picture needs its own style and nothing from anywhere.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class BadRequest(ValueError):
    """The message names the field and the allowed values."""


class Failed(RuntimeError):
    """A scheduler could not answer."""


Ask = Callable[[Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]


def install() -> None:
    """Add the routes to SGLang's application. Safe to call again."""
    from sglang.srt.entrypoints.http_server import app

    if not any(getattr(route, "path", None) == _TREE for route in app.routes):
        add_routes(app, _ask_schedulers)


def add_routes(app: FastAPI, ask: Ask) -> None:
    """
    Args:
        ask: takes a question to the schedulers and brings the answer of every replica.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def tree(request: Request) -> Response:
        return await _answered(request, _tree(request, ask))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def forget(request: Request) -> Response:
        return await _answered(request, _forget(request, ask))

    app.add_api_route(_TREE, tree, methods=["GET"])
    app.add_api_route(_FORGET, forget, methods=["POST"])


async def _answered(request: Request, work: Any) -> Response:
    refusal = _refusal()
    if refusal is not None:
        work.close()
        return _error(refusal, 403)
    try:
        told: Response = await work
        return told
    except BadRequest as error:
        return _error(str(error), 400)
    except Failed as error:
        return _error(str(error), 500)
    except TimeoutError:
        return _error(f"no answer from the scheduler within {PATIENCE_S:g} s", 503)


def _refusal() -> str | None:
    """Why nobody is let in, if so."""
    if not getattr(active_config(), "tenants", ""):
        return None
    from sglang.srt.runtime_context import get_serving

    if get_serving().admin_api_key:
        return None
    return "with tenants this needs the admin key; start the server with --admin-api-key KEY"


async def _tree(request: Request, ask: Ask) -> Response:
    given = dict(request.query_params)
    _only(given, "format", "namespace", "nodes", "replica")
    form = given.get("format", "text")
    if form not in FORMATS:
        raise BadRequest(f"format={form!r}: allowed are {', '.join(FORMATS)}")
    most = _number(given, "nodes", NODES, 1, MOST_NODES)
    replicas = await ask(
        {
            "what": "tree",
            "key": _DIGEST_KEY,
            "most": most,
            "namespace": given.get("namespace"),
        }
    )
    replica = _number(given, "replica", 0, 0, len(replicas) - 1)
    told = replicas[replica]
    _raise_for(told)
    picture = TreePicture.from_json({**told, "replica": replica, "replicas": len(replicas)})
    media, text = render(picture, form)
    return Response(text, media_type=media, headers=_HEADERS)


async def _forget(request: Request, ask: Ask) -> Response:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("tenant"), str):
        raise BadRequest('the body must be {"tenant": NAME}')
    _only(body, "tenant")
    told = await ask({"what": "forget", "tenant": body["tenant"]})
    for one in told:
        _raise_for(one)
    left = sum(one["left_tokens"] for one in told)
    return _json({"tenant": body["tenant"], "left_tokens": left, "replicas": told})


def _raise_for(told: Mapping[str, Any]) -> None:
    if told.get("status") == 400:
        raise BadRequest(told["error"])
    if "error" in told:
        raise Failed(told["error"])


def _only(given: Mapping[str, Any], *allowed: str) -> None:
    for name in given:
        if name not in allowed:
            raise BadRequest(f"unknown field {name!r}: allowed are {', '.join(allowed)}")


def _number(given: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise BadRequest(f"{name}={text!r}: allowed are whole numbers from {low} to {high}")
    return int(text)


async def _ask_schedulers(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    from sglang.srt.entrypoints.http_server import get_global_state

    from sglang_kvshare.engine.control import ANSWER, REPLICA, message

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    asking = asyncio.ensure_future(manager.get_internal_state_communicator(message(question)))
    # Given up, it goes on waiting: a late answer would else be taken for that of the next question.
    outputs = await asyncio.wait_for(asyncio.shield(asking), PATIENCE_S)
    states = sorted((one.internal_state for one in outputs), key=lambda one: one.get(REPLICA, 0))
    answers = [state.get(ANSWER) for state in states]
    if None in answers:
        raise Failed("a scheduler does not know KVShare's questions")
    return answers


def _error(text: str, status: int) -> Response:
    return _json({"error": {"message": text}}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json", headers=_HEADERS)
