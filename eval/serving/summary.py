"""What is said about a window as soon as it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvshare_eval.serving.record import RequestRecord, WindowRecord

#: The client's own lag, 99th percentile, above which a window's times are doubtful.
MAX_LAG_MS = 10.0
MAX_LAG_SHARE_OF_TTFT = 0.05


@dataclass(frozen=True)
class Summary:
    """Figures of one window; ``None`` where no request has them.

    Attributes:
        ttft_p50_ms, ttft_p95_ms, tbt_p50_ms: over the requests that ended well.
        throughput: requests a second that ended well.
        prefix_share, reused_share: of their prompt tokens, from the exact prefix and from
            elsewhere in the cache.
        errors: requests that did not end well.
        lag_p99_ms: how late the client sent.
    """

    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tbt_p50_ms: float | None
    throughput: float
    prefix_share: float | None
    reused_share: float | None
    errors: int
    lag_p99_ms: float

    @property
    def warning(self) -> str | None:
        """Why the client may have distorted the times, if it may have."""
        share = MAX_LAG_SHARE_OF_TTFT * (self.ttft_p50_ms or float("inf"))
        if self.lag_p99_ms <= min(MAX_LAG_MS, share):
            return None
        return (
            f"the client sent up to {self.lag_p99_ms:.1f} ms late (99th percentile): "
            "this machine is too busy for such a load, or the times are too short for it"
        )


def summarize(records: Sequence[RequestRecord], seconds: float) -> Summary:
    good = [one for one in records if one.error is None]
    ttft = [one.ttft_ms for one in good if one.ttft_ms is not None]
    prompt_tokens = sum(one.prompt_tokens for one in good)
    # A stock server sends no report; its cached tokens are prefix tokens.
    prefix = sum(one.report.get("prefix_tokens", one.cached_tokens) for one in good)
    reused = sum(one.report.get("reused_tokens", 0) for one in good)
    return Summary(
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p95_ms=_percentile(ttft, 95),
        tbt_p50_ms=_percentile([gap for one in good for gap in one.tbt_ms], 50),
        throughput=len(good) / seconds,
        prefix_share=prefix / prompt_tokens if prompt_tokens else None,
        reused_share=reused / prompt_tokens if prompt_tokens else None,
        errors=len(records) - len(good),
        lag_p99_ms=_percentile([one.sent_ms - one.due_ms for one in records], 99) or 0.0,
    )


def line(window: WindowRecord, summary: Summary) -> str:
    """One line about a window."""
    parts = [f"{window.key}: {summary.throughput:.2f} requests/s"]
    if summary.ttft_p50_ms is not None and summary.ttft_p95_ms is not None:
        parts.append(f"TTFT {summary.ttft_p50_ms:.0f} ms (p95 {summary.ttft_p95_ms:.0f})")
    if summary.tbt_p50_ms is not None:
        parts.append(f"TBT {summary.tbt_p50_ms:.0f} ms")
    if summary.prefix_share is not None and summary.reused_share is not None:
        parts.append(f"prefix {summary.prefix_share:.0%}, reused {summary.reused_share:.0%}")
    if summary.errors:
        parts.append(f"{summary.errors} failed")
    return ", ".join(parts)


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
