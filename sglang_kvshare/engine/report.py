"""The reuse report in responses.

Seams: ``SchedulerOutputStreamer.get_cached_tokens_details`` (``meta_info.cached_tokens_details``)
and ``openai.utils.cached_tokens_details_from_dict`` (``sglext.cached_tokens_details``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_kvshare.engine.state import state_of
from sglang_kvshare.request import PARAMS_KEY, ReuseReport


def cached_tokens_details(original: Any, self: Any, req: Any) -> dict[str, Any]:
    """Hook: SGLang's own details with ours beside them, present even when all are zero."""
    details = original(self, req) or {"device": 0, "host": 0}
    state = state_of(req)
    report = ReuseReport(reason="unsupported_request") if state is None else state.told()
    # SGLang has counted a branch as a prefix here; what is approximate never counts as cached.
    exact = {"device": req.cached_tokens}
    return {**details, **exact, PARAMS_KEY: report.to_dict()}


def openai_details(original: Any, details: dict[str, Any]) -> Any:
    """Hook: carry our part into the OpenAI response object."""
    result = original(details)
    if PARAMS_KEY not in details:
        return result
    fields = {**result.model_dump(), PARAMS_KEY: details[PARAMS_KEY]}
    return openai_details_class().model_validate(fields)


@cache
def openai_details_class() -> Any:
    """``CachedTokensDetails`` with a field for the report, known to the models that embed it."""
    from pydantic import SerializeAsAny, create_model
    from sglang.srt.entrypoints.openai import protocol

    stock = protocol.CachedTokensDetails
    extended = create_model(
        "KVShareCachedTokensDetails", __base__=stock, kvshare=(dict[str, Any], ...)
    )
    # A pydantic model dumps a field by its declared class; this one is to be dumped by the class
    # of its value.
    field = protocol.SglExt.model_fields["cached_tokens_details"]
    field.annotation = SerializeAsAny[stock] | None  # type: ignore[valid-type]
    protocol.SglExt.model_rebuild(force=True)
    for model in vars(protocol).values():
        if isinstance(model, type) and "sglext" in getattr(model, "model_fields", {}):
            model.model_rebuild(force=True)
    return extended
