"""What one request, and one window of load, leave behind in a serving run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RequestRecord:
    """One request as the client saw it; all times by the client's clock, in milliseconds.

    Attributes:
        key: ``window/number``, unique in the run.
        window: key of the :class:`WindowRecord` that it belongs to.
        number: place in the window's order of arrival.
        due_ms: when it was to be sent, from the window's start (open loop).
        sent_ms: when it was sent; ``sent_ms - due_ms`` is the client's own lag.
        ttft_ms: from ``due_ms`` to the first token: lookup, copy, queueing and the client's lag
            included. ``None`` when no token came.
        tbt_ms: gaps between tokens that came one after the other.
        e2e_ms: from ``due_ms`` to the last token.
        prompt_tokens, output_tokens: the server's counts.
        cached_tokens: SGLang's own count of exact prefix tokens.
        report: KVShare's counts; empty from a stock server.
        error: what went wrong, if anything did.
    """

    key: str
    window: str
    number: int
    due_ms: float
    sent_ms: float
    ttft_ms: float | None
    tbt_ms: tuple[float, ...]
    e2e_ms: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    report: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"type": "request", **asdict(self)}


@dataclass(frozen=True)
class WindowRecord:
    """One stretch of load on one side.

    Attributes:
        key: ``workload/side/rate/repeat``, unique in the run.
        workload: with its options.
        side: ``stock``, ``off`` (KVShare, every request with ``reuse: off`` or ``exact_prefix``) or
            ``reuse``.
        rate: requests per second that were offered; ``inf`` is written as ``null``: one at a time.
        reusable_share: of the prompt tokens, as the workload makes them; ``None`` if not known.
        prompt_tokens: as the workload makes them, median.
        repeat: number of the repetition; the sides of one repeat are interleaved.
        seconds: from the first request due to the last answer.
        scheduler_cpu_s: CPU time of the scheduler process in that window; ``None`` if not known.
        kv_tokens_peak: most KV slots that requests held, as far as polling saw; what is cached and
            can be evicted does not count. ``None`` if the server does not tell.
        kv_bytes_peak: the same in bytes.
        client: ``own`` or ``sglang``; the latter tells no ``due_ms`` and ``sent_ms`` (both 0), and
            its TTFT counts from sending.
    """

    key: str
    workload: str
    side: str
    rate: float | None
    reusable_share: float | None
    prompt_tokens: int
    repeat: int
    seconds: float
    scheduler_cpu_s: float | None = None
    kv_tokens_peak: int | None = None
    kv_bytes_peak: int | None = None
    client: str = "own"

    def to_dict(self) -> dict[str, Any]:
        return {"type": "window", **asdict(self)}
