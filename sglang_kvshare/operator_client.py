"""The operator's routes of a running server, from the command line."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_SECONDS = 90.0


class OperatorError(RuntimeError):
    """Why there is no answer, in one plain sentence."""


def get_tree(url: str, api_key: str | None, form: str, namespace: str | None, nodes: int) -> str:
    """What the cache holds, as text, json, svg or html.

    Raises:
        OperatorError: no such server, or it refuses.
    """
    query = {"format": form, "nodes": str(nodes)}
    if namespace is not None:
        query["namespace"] = namespace
    return _ask(url, "/kvshare/tree?" + urllib.parse.urlencode(query), api_key)


def post_forget(url: str, api_key: str | None, tenant: str) -> dict[str, Any]:
    """Have a tenant forgotten; what the server counted.

    Raises:
        OperatorError: no such server, or it refuses.
    """
    text = _ask(url, "/kvshare/forget", api_key, {"tenant": tenant})
    told = _parsed(text)
    if not isinstance(told, dict) or not isinstance(told.get("left_tokens"), int):
        raise OperatorError(f"{url} answered with something else than counts")
    return told


def describe(told: Mapping[str, Any]) -> str:
    """The answer of :func:`post_forget` in sentences."""
    lines = []
    for number, one in enumerate(told["replicas"]):
        where = f"replica {number}: " if len(told["replicas"]) > 1 else ""
        others = one["of_others_tokens"]
        lines.append(
            f"{where}removed {one['removed_tokens']:,} tokens in {one['removed_nodes']:,} nodes"
            + (f", {others:,} of them others' text behind the tenant's" if others else "")
            + ("; overwritten with zeros" if one["overwritten"] else "")
        )
        lines.append(
            f"{where}a walk over tree and indices finds {one['left_in_tree']:,} tokens in the "
            f"tree, {one['left_in_index']:,} in the index, {one['left_windows']:,} windows of "
            f"similar donors; {one['running_requests']:,} running requests hold "
            f"{one['left_in_running_requests']:,} more"
        )
        if not one["ranks_agree"]:
            lines.append(f"{where}THE RANKS DO NOT AGREE: these are the counts of the first one")
    if told["left_tokens"]:
        lines.append("What is left serves nobody and goes when these requests end: ask again.")
    else:
        lines.append(f"Nothing of {told['tenant']!r} is left.")
    return "\n".join(lines)


def _ask(url: str, path: str, api_key: str | None, body: Mapping[str, Any] | None = None) -> str:
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(base + path, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return str(response.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        raise OperatorError(_refused(base, path.partition("?")[0], error)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise OperatorError(f"no server answers at {base}: {why}") from None


def _refused(base: str, path: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"{base} asks for its admin key: --api-key KEY"
    if error.code == 404:
        return f"no SGLang server with KVShare at {base}: it has no {path}"
    content = _parsed(error.read().decode("utf-8", "replace"))
    said = content.get("error") if isinstance(content, dict) else None
    if isinstance(said, dict):
        said = said.get("message")
    return f"{base}{path} answered {error.code}: {said or error.reason}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
