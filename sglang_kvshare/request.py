"""What one request may say about reuse, and what it is told in return."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_kvshare.config import (
    ATTENTION_SOURCES,
    REUSE_MODES,
    KVShareConfig,
    layer_numbers,
)
from sglang_kvshare.recompute.selectors import selector_named, selector_names

#: The key under ``custom_params`` that holds the settings of a request.
PARAMS_KEY = "kvshare"
#: The one value of ``publish_as``.
PUBLIC = "public"


#: Share that is assumed to be recomputed for an error target.
ASSUMED_RATIO = 0.2


class RequestError(ValueError):
    """A bad per-request value; the message names the field and what is allowed (HTTP 400)."""


@dataclass(frozen=True)
class RequestOptions:
    """Settings of one request, defaults already filled in from the server's configuration.

    ``publish``: what is computed for this request stays in the cache for others.
    ``approximate_logprobs``: log-probabilities of prompt tokens may rest on values that are reused
    before ``logprob_start_len``; without it such a request is computed exactly.
    ``publish_as``: the prompt is a passage that the operator publishes for all tenants.
    """

    reuse: str
    recompute_ratio: float
    selector: str
    publish: bool = True
    approximate_logprobs: bool = False
    recompute_error: float = KVShareConfig.recompute_error
    attention: str = KVShareConfig.attention
    check_layers: str = KVShareConfig.check_layers
    max_deviation: float = KVShareConfig.max_deviation
    probe_tokens: int = KVShareConfig.probe_tokens
    refresh_tokens: int = KVShareConfig.refresh_tokens
    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None
    publish_as: str | None = None

    @property
    def quality(self) -> str:
        """Settings that decide how close reused values come to computed ones."""
        values = (
            self.selector,
            self.recompute_ratio,
            self.recompute_error,
            self.attention,
            self.check_layers,
            self.max_deviation,
            self.probe_tokens,
        )
        return ":".join(map(str, values))

    @property
    def expected_ratio(self) -> float:
        """Share of the matched tokens that will be recomputed, before anything is known of them:
        most prompts reach an error target with less than a fifth."""
        return self.recompute_ratio if self.recompute_error >= 1 else ASSUMED_RATIO

    @property
    def spares(self) -> bool:
        """Whether any reused token may be left as it is."""
        fixed = selector_named(self.selector).fixed_ratio
        if fixed is not None:
            return fixed < 1
        return self.recompute_ratio < 1 or self.recompute_error < 1


@dataclass(frozen=True)
class Reason:
    """One value of :attr:`ReuseReport.reason`.

    ``decisions``: the values of ``decision`` that it comes with.
    """

    name: str
    doc: str
    decisions: tuple[str, ...] = ("none",)


#: Placing may fail for a part of the reused tokens, and the rest is still reuse.
_IN_PART = ("none", "reuse")
#: Every reason that a report may give, the usual ones first; labels of the metrics as well.
REASONS = (
    Reason("ok", "cached passages were reused", ("reuse",)),
    Reason("no_match", "no cached run of `min_run_tokens` beyond the prefix"),
    Reason("prefix_covers_prompt", "the exact prefix leaves too little to look for"),
    Reason("below_minimum", "the plan would spare fewer than `min_saved_tokens` rows"),
    Reason("gate_closed", "measured times say that reuse would not save any here"),
    Reason("off", "the request, or the server's default, asks for no reuse at all"),
    Reason("exact_prefix", "the request, or the server's default, asks for the exact prefix only"),
    Reason("prompt_logprobs", "log-probabilities of prompt tokens are asked for: computed exactly"),
    Reason(
        "unsupported_request",
        "embeddings as input, images, sessions, beams, hidden states, multi-item scoring",
    ),
    Reason("donor_evicted", "donors made room before their values were copied", _IN_PART),
    Reason("donor_invalid", "a donor held values that are not finite; it serves no more", _IN_PART),
    Reason("deviation", "all donors' values were off by more than `max_deviation`"),
    Reason("bad_request_options", "settings that reached the scheduler unchecked"),
    Reason("force_miss", "SGLang's test switch `SGLANG_RADIX_FORCE_MISS` is set"),
    Reason("not_prefilled", "the request ended before its prefill"),
    Reason("index_failed", "a fault: the index cannot follow the tree; until the next flush"),
    Reason(
        "planning_failed", "a fault while matching, selecting or locking, logged with its trace"
    ),
    Reason("placement_failed", "a fault while copying the donors' values", _IN_PART),
    Reason(
        "selection_failed", "a fault in the probe pass; the batch is computed in full", _IN_PART
    ),
    Reason("narrowing_failed", "a fault in the narrowed forward: the batch ran in full", _IN_PART),
)


@dataclass(frozen=True)
class ReuseReport:
    """What happened to one prompt; the four counts sum to ``prompt_tokens``.

    ``prefix_tokens``: taken from the exact prefix; ``reused_tokens``: taken from elsewhere in the
    cache; ``recomputed_tokens``: found in the cache but computed again; ``new_tokens``: computed
    because no cached run covers them; ``refreshed_tokens``: recomputed while decoding;
    ``donors``: cached sequences that served; ``decision``: ``reuse`` or ``none``; ``reason``: why,
    one of :data:`REASONS`; ``selector``: what chose the recomputed tokens, ``NAME+seams`` where a
    prompt ran in several chunks of which only the last could use ``NAME``; empty without reuse;
    ``computed_rows``: prompt tokens that ran, as a mean over the model's layers, the probe pass
    included: what the prefill has cost.
    """

    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    refreshed_tokens: int = 0
    donors: int = 0
    decision: str = "none"
    reason: str = "not_prefilled"
    selector: str = ""
    computed_rows: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.reused_tokens + self.recomputed_tokens + self.new_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_request_options(custom_params: Any, config: KVShareConfig) -> RequestOptions:
    """Read ``custom_params['kvshare']`` of one request.

    Args:
        custom_params: what the client sent: an object, or ``None`` for nothing.
        config: the server's defaults.

    Raises:
        RequestError: unknown key, or a value that is not allowed.
    """
    if custom_params is not None and not isinstance(custom_params, Mapping):
        raise RequestError(f"custom_params must be an object, not {type(custom_params).__name__}")
    raw = (custom_params or {}).get(PARAMS_KEY)
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise RequestError(
            f"custom_params.{PARAMS_KEY} must be an object such as "
            f'{{"reuse": "off"}}, not {type(raw).__name__}'
        )
    allowed = tuple(RequestOptions.__dataclass_fields__)
    for key in raw:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1, cutoff=0.0)[0]
            raise RequestError(
                f"custom_params.{PARAMS_KEY}.{key} is unknown; did you mean {near!r}? "
                f"Allowed are {', '.join(allowed)}"
            )
    return RequestOptions(
        reuse=_choice(raw, "reuse", config.reuse, REUSE_MODES),
        recompute_ratio=_share(raw, "recompute_ratio", config.recompute_ratio),
        selector=_choice(raw, "selector", config.selector, selector_names()),
        publish=_switch(raw, "publish", True),
        approximate_logprobs=_switch(raw, "approximate_logprobs", False),
        recompute_error=_share(raw, "recompute_error", config.recompute_error),
        attention=_choice(raw, "attention", config.attention, ATTENTION_SOURCES),
        check_layers=_layers(raw, config.check_layers),
        max_deviation=_share(raw, "max_deviation", config.max_deviation, most=math.inf),
        probe_tokens=_count(raw, "probe_tokens", config.probe_tokens, least=1, most=4096),
        refresh_tokens=_count(raw, "refresh_tokens", config.refresh_tokens, most=64),
        ttft_slo_ms=_milliseconds(raw, "ttft_slo_ms"),
        tbt_slo_ms=_milliseconds(raw, "tbt_slo_ms"),
        publish_as=_public(raw, config),
    )


def _public(raw: Mapping[str, Any], config: KVShareConfig) -> str | None:
    value = raw.get("publish_as")
    if value is None:
        return None
    if value != PUBLIC:
        raise RequestError(f"custom_params.{PARAMS_KEY}.publish_as={value!r}: allowed is {PUBLIC}")
    if not config.tenants:
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.publish_as: this server tells no tenants apart "
            "(--kvshare-tenants FILE.yaml), so that there is nobody to publish for"
        )
    return PUBLIC


def _choice(raw: Mapping[str, Any], key: str, default: str, allowed: tuple[str, ...]) -> str:
    value = raw.get(key, default)
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.{key}={value!r}: allowed are {', '.join(allowed)}"
        )
    return value


def _switch(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.{key}={value!r}: allowed are true and false"
        )
    return value


def _share(raw: Mapping[str, Any], key: str, default: float, most: float = 1.0) -> float:
    value = raw.get(key, default)
    # `0 <= nan` is false, so a NaN is refused here as well.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.{key}={value!r}: allowed are numbers from 0 to {most:g}"
        )
    return float(value)


def _count(raw: Mapping[str, Any], key: str, default: int, *, least: int = 0, most: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.{key}={value!r}: "
            f"allowed are whole numbers from {least} to {most}"
        )
    return value


def _layers(raw: Mapping[str, Any], default: str) -> str:
    value = raw.get("check_layers", default)
    try:
        # A single layer may be given as a number.
        return ",".join(map(str, layer_numbers(str(value))))
    except ValueError as error:
        raise RequestError(f"custom_params.{PARAMS_KEY}.check_layers={value!r}: {error}") from error


def _milliseconds(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise RequestError(
            f"custom_params.{PARAMS_KEY}.{key}={value!r}: allowed are milliseconds above 0"
        )
    return float(value)
