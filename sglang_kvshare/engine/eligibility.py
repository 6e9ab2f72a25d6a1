"""Which requests may take approximate values, and why others may not.

Seam: the attributes of ``Req`` that make a request special.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from sglang_kvshare.engine.state import RequestState
from sglang_kvshare.request import RequestOptions


def accepts_approximation(req: Any, state: RequestState) -> bool:
    """Whether a request may get a value that is not exact."""
    options = state.options
    wanted = options.reuse == "approximate" and options.spares
    return wanted and refusal(req, options) is None


def scored_tokens(req: Any) -> int:
    """Tokens at the end of the input whose logits are asked for; the last one's always are."""
    length = len(req.origin_input_ids) + len(req.output_ids)
    if not req.return_logprob or req.logprob_start_len < 0:
        return 1
    return max(1, length - int(req.logprob_start_len))


def refusal(req: Any, options: RequestOptions) -> str | None:
    """Why this request must be computed in full, if it must; a reason of the report."""
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        return "force_miss"
    if scored_tokens(req) > 1 and not options.approximate_logprobs:
        return "prompt_logprobs"
    return "unsupported_request" if is_special(req) else None


def is_special(req: Any) -> bool:
    """Whether its keys and values follow from more than its tokens, or more than its output tokens
    is asked for."""
    special = (
        req.input_embeds,
        req.positional_embed_overrides,
        req.multimodal_inputs,
        req.session,
        req.beam_group,
        req.multi_item_delimiter_indices,
        req.token_indices_to_pool,
    )
    return bool(req.return_hidden_states) or any(value is not None for value in special)
