"""Per-request settings: checked where the request enters, attached where the scheduler makes it.

Seams: ``SamplingParams.verify`` (raises ``ValueError``, which SGLang answers with HTTP 400),
``http_server.serve_generate_request`` and ``OpenAIServingBase.handle_request`` (a streaming
response has sent its status before ``verify`` runs, and before its tenant is looked for),
``Scheduler._create_generation_req``,
``Req.skip_radix_cache_insert`` (keeps what a request computes out of the tree).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine import tenancy
from sglang_kvshare.engine.activation import active_config
from sglang_kvshare.engine.schedule import schedule_of
from sglang_kvshare.engine.state import RequestState, attach
from sglang_kvshare.matching.namespace import Namespace
from sglang_kvshare.request import RequestError, ReuseReport, parse_request_options
from sglang_kvshare.tenants import PUBLISHED, UnknownTenant


def verify(original: Any, self: Any, vocab_size: int) -> Any:
    """Hook of ``SamplingParams.verify``."""
    parse_request_options(self.custom_params, _config())
    return original(self, vocab_size)


async def serve_generate(original: Any, obj: Any, request: Any) -> Any:
    """Hook of ``serve_generate_request``: the native API, before a stream begins."""
    given = obj.sampling_params
    try:
        for params in given if isinstance(given, list) else [given]:
            if isinstance(params, Mapping):
                parse_request_options(params.get("custom_params"), _config())
        _assign(obj, request)
    except (RequestError, UnknownTenant) as error:
        from sglang.srt.utils.json_response import orjson_response

        status = 403 if isinstance(error, UnknownTenant) else 400
        return orjson_response({"error": {"message": str(error)}}, status_code=status)
    return await original(obj, request)


def _assign(obj: Any, request: Any) -> None:
    tenants = tenancy.book()
    if tenants is None:
        return
    from sglang.srt.entrypoints.http_server import get_global_state

    from sglang_kvshare.engine.tenant_requests import assign, is_starting

    starting = is_starting(get_global_state().tokenizer_manager)
    assign(tenants, obj, request, starting=starting)


async def handle_openai(original: Any, self: Any, request: Any, raw_request: Any) -> Any:
    """Hook of ``OpenAIServingBase.handle_request``: the OpenAI API, before a stream begins."""
    custom_params = getattr(request, "custom_params", None)
    try:
        parse_request_options(custom_params, _config())
        tenants = tenancy.book()
        if tenants is not None:
            from sglang_kvshare.engine.tenant_requests import check, is_starting

            starting = is_starting(self.tokenizer_manager)
            check(tenants, raw_request, custom_params, starting=starting)
    except RequestError as error:
        return self.create_error_response(str(error))
    except UnknownTenant as error:
        return self.create_error_response(str(error), "PermissionDeniedError", status_code=403)
    return await original(self, request, raw_request)


def create(original: Any, self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``Scheduler._create_generation_req``: settings and namespace of the request."""
    req = original(self, recv_req, *args, **kwargs)
    config = _config()
    tenant = _take_tenant(req)
    try:
        state = RequestState(parse_request_options(req.sampling_params.custom_params, config))
    except RequestError:
        # Checked at the entrance; a request that came another way is served without reuse.
        state = RequestState(
            parse_request_options({"kvshare": {"reuse": "exact_prefix"}}, config),
            report=ReuseReport(reason="bad_request_options"),
        )
    # SGLang has joined the caller's key and the adapter without a separator; undo that before
    # any key is built from them.
    req.extra_key = Namespace(
        extra_key=kwargs.get("extra_key"), adapter=kwargs.get("lora_id")
    ).tree_key()
    _give_tenant(state, tenant, req.cache_salt, kwargs.get("lora_id"))
    attach(req, state)
    schedule = schedule_of(self.tree_cache)
    if schedule is not None:
        try:
            schedule.arrived(req, state, Namespace(req.cache_salt, req.extra_key).encode())
        except Exception:
            state.job = None
            schedule.fault("a request that came")
    if not state.options.publish:
        req.skip_radix_cache_insert = True
    return req


def _take_tenant(req: Any) -> Any:
    """What the HTTP process wrote; without tenants, what a client did."""
    params = req.sampling_params
    if not isinstance(params.custom_params, Mapping):
        return None
    kept = dict(params.custom_params)
    tenant = kept.pop(tenancy.TENANT_PARAM, None)
    params.custom_params = kept or None
    return tenant


def _give_tenant(state: RequestState, tenant: Any, salt: str | None, adapter: str | None) -> None:
    tenants = tenancy.book()
    if tenants is None:
        return
    known = isinstance(tenant, str) and tenant in tenants.file.tenants
    state.tenant = tenant if known else None
    if salt == tenants.public_salt:
        # Only what an operator publishes gets this salt.
        state.tenant = PUBLISHED
    state.domain = tenants.may_share(tenant if known else None)
    if known:
        published = Namespace(tenants.public_salt, Namespace(adapter=adapter).tree_key())
        state.shared_namespaces = (published.encode(),)


def _config() -> KVShareConfig:
    config = active_config()
    if config is None:
        raise RuntimeError("a KVShare hook runs although KVShare is off")
    return config
