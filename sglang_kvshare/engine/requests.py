"""Per-request settings: checked where the request enters, attached where the scheduler makes it.

Seams: ``SamplingParams.verify`` (raises ``ValueError``, which SGLang answers with HTTP 400),
``http_server.serve_generate_request`` and ``OpenAIServingBase.handle_request`` (a streaming
response has sent its status before ``verify`` runs), ``Scheduler._create_generation_req``,
``Req.skip_radix_cache_insert`` (keeps what a request computes out of the tree).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.activation import active_config
from sglang_kvshare.engine.state import RequestState, attach
from sglang_kvshare.matching.namespace import Namespace
from sglang_kvshare.request import RequestError, ReuseReport, parse_request_options


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
    except RequestError as error:
        from sglang.srt.utils.json_response import orjson_response

        return orjson_response({"error": {"message": str(error)}}, status_code=400)
    return await original(obj, request)


async def handle_openai(original: Any, self: Any, request: Any, raw_request: Any) -> Any:
    """Hook of ``OpenAIServingBase.handle_request``: the OpenAI API, before a stream begins."""
    try:
        parse_request_options(getattr(request, "custom_params", None), _config())
    except RequestError as error:
        return self.create_error_response(str(error))
    return await original(self, request, raw_request)


def create(original: Any, self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``Scheduler._create_generation_req``: settings and namespace of the request."""
    req = original(self, recv_req, *args, **kwargs)
    config = _config()
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
    attach(req, state)
    if not state.options.publish:
        req.skip_radix_cache_insert = True
    return req


def _config() -> KVShareConfig:
    config = active_config()
    if config is None:
        raise RuntimeError("a KVShare hook runs although KVShare is off")
    return config
