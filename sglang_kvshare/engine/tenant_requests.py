"""Whose a request is, and the namespace that it gets: where all of SGLang's HTTP entrances meet.

    client -> /generate, /v1/..., /api/chat, /v1/messages, ... -> generate_request -> scheduler
                                                                   ^ here

Seam: ``TokenizerManager.generate_request(obj, request)``, which every entrance calls with the
client's request, and where ``obj`` is not split into its parts yet.
``TokenizerManager.server_status``, ``Starting`` until SGLang's warm-up is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Any

from sglang_kvshare.engine import tenancy
from sglang_kvshare.engine.tenancy import TENANT_PARAM
from sglang_kvshare.request import PARAMS_KEY, PUBLIC, RequestError
from sglang_kvshare.tenants import TenantBook, UnknownTenant

#: Answered by SGLang with a request of its own, on behalf of whoever asks.
_HEALTH = ("/health", "/health_generate")


@cache
def forbidden_class() -> type[Exception]:
    """HTTP 403 in whichever way an entrance looks at errors: some know ``HTTPException``, others
    a ``ValueError`` with a status."""
    from fastapi import HTTPException

    class Forbidden(HTTPException, ValueError):
        def __init__(self, message: str) -> None:
            super().__init__(status_code=403, detail=message)

        def __str__(self) -> str:
            return str(self.detail)

    return Forbidden


def generate(original: Any, self: Any, obj: Any, request: Any = None) -> Any:
    """Hook of ``TokenizerManager.generate_request``."""
    tenants = tenancy.book()
    if tenants is not None:
        try:
            assign(tenants, obj, request, starting=is_starting(self))
        except (UnknownTenant, RequestError) as error:
            return _failing(as_http(error))
    return original(self, obj, request)


async def _failing(error: Exception) -> AsyncIterator[Any]:
    """Raises where SGLang's own errors would: when the first answer is waited for."""
    raise error
    yield


def as_http(error: Exception) -> Exception:
    """What SGLang answers with HTTP 403, or 400 for what is no matter of rights."""
    return forbidden_class()(str(error)) if isinstance(error, UnknownTenant) else error


def is_starting(tokenizer_manager: Any) -> bool:
    """Until then the server has no other clients than its own warm-up."""
    return bool(tokenizer_manager.server_status.value == "Starting")


def check(tenants: TenantBook, request: Any, custom_params: Any, *, starting: bool) -> None:
    """Whether a client's request would be served, for entrances that begin a stream.

    Raises:
        UnknownTenant: it would not.
    """
    if _publishes([{"custom_params": custom_params}]):
        _must_be_operator(tenants, request)
    else:
        _tenant_of(tenants, request, starting)


def assign(tenants: TenantBook, obj: Any, request: Any, *, starting: bool) -> None:
    """Put a request where its tenant's requests belong. Doing it twice is doing it once.

    Args:
        obj: SGLang's ``GenerateReqInput`` or ``EmbeddingReqInput``, not normalised yet; changed.
        request: the client's; ``None`` for one of this process's own.
        starting: the server is not ready for clients yet.

    Raises:
        UnknownTenant: nobody's, or one that asks for what is the operator's.
        RequestError: what no tenant may ask for.
    """
    if request is None and starting:
        # `sglang.Engine`, whose status stays there, and the warm-ups that SGLang has built in.
        return
    if not hasattr(obj, "cache_salt"):
        # SGLang has no namespaces for embeddings, and no embeddings from a model that generates.
        _tenant_of(tenants, request, starting)
        return
    given = _parts(obj.sampling_params)
    publishes = _publishes(given)
    if publishes:
        _must_be_operator(tenants, request)
        tenant = None
    else:
        tenant = _tenant_of(tenants, request, starting)
    if obj.session_params:
        raise RequestError(
            "session_params: sessions are not served beside tenants, because any client may "
            "continue any session"
        )
    marked = [_marked(params, tenant) for params in given]
    if publishes:
        _publish(tenants, obj, marked)
        return
    obj.sampling_params = marked if isinstance(obj.sampling_params, list) else marked[0]
    obj.cache_salt = (
        [_salted(tenants, tenant, salt) for salt in obj.cache_salt]
        if isinstance(obj.cache_salt, list)
        else _salted(tenants, tenant, obj.cache_salt)
    )


def _publish(tenants: TenantBook, obj: Any, marked: list[Any]) -> None:
    salts = obj.cache_salt if isinstance(obj.cache_salt, list) else [obj.cache_salt]
    for field, values in (("cache_salt", salts), ("extra_key", [obj.extra_key])):
        if any(value and value != tenants.public_salt for value in values):
            raise RequestError(
                f"{field}: a published passage is everybody's; it must not be given with "
                f"custom_params.{PARAMS_KEY}.publish_as"
            )
    obj.cache_salt = tenants.public_salt
    params = {
        # No answer: the cache keeps the passage, and nothing that was made of it.
        "max_new_tokens": 0,
        "temperature": 0.0,
        "custom_params": {PARAMS_KEY: {"reuse": "exact_prefix", "publish_as": PUBLIC}},
    }
    obj.sampling_params = [params for _ in marked] if len(marked) > 1 else params


def _parts(sampling_params: Any) -> list[Any]:
    """Of each prompt, or the one for all."""
    if isinstance(sampling_params, list):
        return sampling_params
    return [{} if sampling_params is None else sampling_params]


def _publishes(given: list[Any]) -> bool:
    """
    Raises:
        RequestError: some of a batch do, and some do not.
    """
    told = {_own(params).get("publish_as") is not None for params in given}
    if len(told) > 1:
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.publish_as: give it for all prompts of a batch, or none"
        )
    return told == {True}


def _own(params: Any) -> Mapping[str, Any]:
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    own = custom.get(PARAMS_KEY) if isinstance(custom, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _marked(params: Any, tenant: str | None) -> Any:
    """Sampling parameters that say whose they are; what SGLang refuses is left for it."""
    if not isinstance(params, Mapping):
        return params
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, Mapping):
        raise RequestError(f"custom_params must be an object, not {type(custom).__name__}")
    kept = {name: value for name, value in (custom or {}).items() if name != TENANT_PARAM}
    if tenant is not None:
        kept[TENANT_PARAM] = tenant
    if custom is None and not kept:
        return params
    return {**params, "custom_params": kept}


def _salted(tenants: TenantBook, tenant: str | None, salt: Any) -> Any:
    if salt is not None and not isinstance(salt, str):
        return salt
    # SGLang takes an empty salt for none.
    return tenants.salt(tenant, salt or None)


# --- whose it is --------------------------------------------------------------------------------


def _tenant_of(tenants: TenantBook, request: Any, starting: bool) -> str | None:
    scope = getattr(request, "scope", None) or {}
    headers = getattr(request, "headers", {})
    try:
        named = tenants.file.header
        return tenants.tenant_of(_key(headers), _one(headers, named) if named else None)
    except UnknownTenant:
        # SGLang's own requests have no key: the warm-up before there are clients, and the fixed
        # prompt of a health check. The path is the scope's: a URL is made of the client's Host.
        if starting or scope.get("path") in _HEALTH:
            return None
        raise


def _must_be_operator(tenants: TenantBook, request: Any) -> None:
    if not tenants.is_operator(_key(getattr(request, "headers", {}))):
        raise UnknownTenant(
            f"custom_params.{PARAMS_KEY}.publish_as needs one of the tenants file's operator_keys"
        )


def _key(headers: Any) -> str | None:
    """The bearer token, or what Anthropic's clients send in its place."""
    scheme, _, token = (_one(headers, "Authorization") or "").partition(" ")
    return token if scheme.lower() == "bearer" else _one(headers, "X-Api-Key")


def _one(headers: Any, name: str) -> str | None:
    """
    Raises:
        UnknownTenant: it came twice; a proxy that adds a header may have let the client's through.
    """
    every = getattr(headers, "getlist", lambda name: [headers.get(name)])(name)
    if len(set(every)) > 1:
        raise UnknownTenant(f"the header {name} came more than once, with different values")
    return every[0] if every else None
