"""What KVShare counts: plain numbers for a log line a minute, and the same for Prometheus.

Seams: ``Scheduler.get_next_batch_to_run`` (once a step, idle steps included) for the clock;
``runtime_context.get_parallel``, ``get_serving``, ``get_observability`` for the labels that
SGLang's own series carry. The series are written in the scheduler process into SGLang's
``PROMETHEUS_MULTIPROC_DIR``, from where the server's ``/metrics`` reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec

from sglang_kvshare.plan import ReusePlan
from sglang_kvshare.request import REASONS, ReuseReport

logger = logging.getLogger(__name__)

LINE_SECONDS = 60.0
GAUGE_SECONDS = 1.0

#: Where the tokens of a prompt came from. ``approximate_prefix`` is a prefix that rests on reused
#: values, ``reused`` was copied from another offset; a report counts both as reused.
SOURCES = ("prefix", "approximate_prefix", "reused", "recomputed", "new")
#: Where a fault of KVShare can happen; each costs a cache miss.
STEPS = (
    "match",
    "lock",
    "alloc",
    "copy",
    "select",
    "narrow",
    "publish",
    "index",
    "similar",
    "edges",
    "retention",
    "refresh",
    "schedule",
    "lengths",
    "swap",
)
#: Directions of copies between the KV pool and host memory.
DIRECTIONS = ("out", "in")
#: Why a preempted request that was to be swapped is recomputed all the same: there was no room in
#: the host pool; the copy failed or was dropped (new weights, forgotten, expired); the prefix in
#: front of it has left the tree; there were no slots, or copying back failed.
FALLBACKS = ("pool_full", "copy_failed", "dropped", "prefix_gone", "no_slots", "load_failed")
#: What finds cached tokens: runs of equal tokens, similar windows, and reuse edges, which spare the
#: search for runs.
FOUND_BY = ("edge", "run", "similar")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class Series:
    """One Prometheus metric; compared by identity, being one of :data:`SERIES`.

    Attributes:
        labels: names of its labels, besides those that SGLang's series carry.
        values: the label values that are exported from the start, with zero.
        buckets: upper bounds, for a histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()


REQUESTS = Series(
    "kvshare:requests_total",
    "counter",
    "Requests whose prefill is finished, each counted once.",
    ("decision", "reason"),
    tuple((decision, reason.name) for reason in REASONS for decision in reason.decisions),
)
TOKENS = Series(
    "kvshare:prompt_tokens_total",
    "counter",
    "Prompt tokens of these requests by where they came from.",
    ("source",),
    tuple((source,) for source in SOURCES),
)
DONORS = Series(
    "kvshare:donors",
    "histogram",
    "Cached sequences that served a request with reuse.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
)
FAULTS = Series(
    "kvshare:faults_total",
    "counter",
    "Faults inside KVShare by the step they happened in; each became a cache miss.",
    ("step",),
    tuple((step,) for step in STEPS),
)
PLAN = Series(
    "kvshare:plan_seconds",
    "histogram",
    "Time to match, select and lock for one admitted request.",
    buckets=_SECONDS,
)
COPY = Series(
    "kvshare:copy_seconds",
    "histogram",
    "Time to copy and rotate the donors of one batch; on a GPU, to enqueue that.",
    buckets=_SECONDS,
)
PLANNED = Series(
    "kvshare:planned_tokens_total",
    "counter",
    "Prompt tokens that carried-out plans found in the cache, by what found them.",
    ("found_by",),
    tuple((found_by,) for found_by in FOUND_BY),
)
COPIED = Series("kvshare:copied_tokens_total", "counter", "Tokens copied from donors.")
ATTAINED = Series(
    "kvshare:slo_total",
    "counter",
    "Finished requests with an SLO by kind (ttft, tbt: the mean time between tokens) and outcome.",
    ("kind", "outcome", "tenant"),
    tuple((kind, outcome, "") for kind in ("ttft", "tbt") for outcome in ("met", "missed")),
)
ANSWERS = Series(
    "kvshare:answers_total",
    "counter",
    "Answers that ended within the tokens reserved for them, and beyond.",
    ("outcome",),
    (("within",), ("beyond",)),
)
HELD = Series(
    "kvshare:held_requests_total",
    "counter",
    "Requests held back for a passage that another one was computing, once for each hold.",
)
PREEMPTIONS = Series(
    "kvshare:preemptions_total",
    "counter",
    "Running requests that gave way: before KV ran short, or when the pool was full.",
    ("cause",),
    (("foreseen",), ("pool_full",)),
)
RESERVED_TOKENS = Series(
    "kvshare:reserved_tokens", "gauge", "KV tokens that running requests may grow to in all."
)
HOSTED_TOKENS = Series(
    "kvshare:hosted_tokens",
    "gauge",
    "Of these, tokens granted twice: to those that will have ended when others grow there.",
)
INDEX_TOKENS = Series("kvshare:index_tokens", "gauge", "Cached tokens that can be found.")
INDEX_NAMESPACES = Series(
    "kvshare:index_namespaces", "gauge", "Trust domains that hold at least one of them."
)
INDEX_ENTRIES = Series(
    "kvshare:index_entries", "gauge", "Entries of the window table, dead ones included."
)
INDEX_BYTES = Series("kvshare:index_bytes", "gauge", "Memory of the index.")
INDEX_FAILED = Series(
    "kvshare:index_failed", "gauge", "1 after a fault in the index, until the next flush."
)
DONOR_LOCKS = Series(
    "kvshare:donor_locks", "gauge", "Donors that are locked until their values are copied."
)
SWAPS = Series(
    "kvshare:swaps_total",
    "counter",
    "Preempted requests copied to host memory, and back.",
    ("direction",),
    tuple((direction,) for direction in DIRECTIONS),
)
SWAPPED = Series(
    "kvshare:swapped_tokens_total",
    "counter",
    "Tokens of these copies.",
    ("direction",),
    tuple((direction,) for direction in DIRECTIONS),
)
SWAP_FALLBACKS = Series(
    "kvshare:swap_fallbacks_total",
    "counter",
    "Preempted requests that were to be swapped and are recomputed.",
    ("reason",),
    tuple((reason,) for reason in FALLBACKS),
)
HOST_POOL = Series(
    "kvshare:host_pool_tokens", "gauge", "Tokens of preempted requests in host memory."
)
SERIES = (
    *(REQUESTS, TOKENS, DONORS, FAULTS, PLAN, COPY, PLANNED, COPIED),
    *(ATTAINED, ANSWERS, HELD, PREEMPTIONS, RESERVED_TOKENS, HOSTED_TOKENS),
    *(INDEX_TOKENS, INDEX_NAMESPACES, INDEX_ENTRIES, INDEX_BYTES, INDEX_FAILED, DONOR_LOCKS),
    *(SWAPS, SWAPPED, SWAP_FALLBACKS, HOST_POOL),
)


def exported_names() -> set[str]:
    """The names under which Prometheus stores the samples of :data:`SERIES`."""
    names = {series.name for series in SERIES if series.kind != "histogram"}
    for series in SERIES:
        if series.kind == "histogram":
            names |= {series.name, *(series.name + end for end in ("_bucket", "_count", "_sum"))}
    return names


@dataclass(frozen=True)
class IndexSize:
    """What the gauges show; ``entries`` counts dead ones too, until they are swept."""

    tokens: int
    namespaces: int
    entries: int
    bytes: int
    donor_locks: int
    failed: bool
    host_pool_tokens: int = 0

    def by_series(self) -> dict[Series, float]:
        return {
            INDEX_TOKENS: self.tokens,
            INDEX_NAMESPACES: self.namespaces,
            INDEX_ENTRIES: self.entries,
            INDEX_BYTES: self.bytes,
            INDEX_FAILED: float(self.failed),
            DONOR_LOCKS: self.donor_locks,
            HOST_POOL: self.host_pool_tokens,
        }


class Exporter:
    """All of :data:`SERIES` in ``prometheus_client``, each present with zero once this is made.

    Args:
        labels: name -> value, the same on every series.
        registry: a ``CollectorRegistry``; by default one of our own, because what SGLang exports
            is read from the files of its multiprocess directory, whatever the registry.
    """

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry() if registry is None else registry
        self._labels = tuple(map(str, labels.values()))
        self._metrics: dict[Series, Any] = {}
        self._children: dict[tuple[Series, tuple[str, ...]], Any] = {}
        for series in SERIES:
            names = (*labels, *series.labels)
            if series.kind == "counter":
                metric: Any = Counter(series.name, series.doc, names, registry=registry)
            elif series.kind == "histogram":
                metric = Histogram(
                    series.name, series.doc, names, registry=registry, buckets=series.buckets
                )
            else:
                metric = Gauge(
                    series.name,
                    series.doc,
                    names,
                    registry=registry,
                    multiprocess_mode="mostrecent",
                )
            self._metrics[series] = metric
            for values in series.values:
                child = self.child(series, values)
                if series.kind == "gauge":
                    # The most recent value of all processes is shown, and none before a first.
                    child.set(0)

    def child(self, series: Series, values: tuple[str, ...] = ()) -> Any:
        """The ``prometheus_client`` object of one set of label values."""
        key = (series, values)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = self._metrics[series].labels(*self._labels, *values)
        return found


_P = ParamSpec("_P")


def _safe(
    method: Callable[Concatenate[Metrics, _P], None],
) -> Callable[Concatenate[Metrics, _P], None]:
    """Counting must never harm a request: what goes wrong is logged, the first time."""

    @wraps(method)
    def guarded(self: Metrics, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            if not self.failed:
                self.failed = True
                logger.exception("KVShare could not count in %s; only logged once", method.__name__)

    return guarded


class Metrics:
    """The counts of one scheduler process. No method raises, whatever it is given.

    Args:
        exporter: where the counts go besides the log; ``None`` exports nothing.
        log_lines: write a line a minute; one rank of a server does.
        clock: seconds that only differences are taken of.
    """

    def __init__(
        self,
        exporter: Exporter | None = None,
        *,
        log_lines: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed = False
        self._exporter = exporter
        self._log_lines = log_lines
        self._clock = clock
        self._read_index: Callable[[], IndexSize] | None = None
        self._read_schedule: Callable[[], Mapping[Series, float]] | None = None
        self._gauges_at: float | None = None
        self._line_at = clock()
        #: Totals of the counters since the start, by series and label values.
        self.totals: dict[tuple[Series, tuple[str, ...]], float] = {
            (series, values): 0
            for series in SERIES
            if series.kind == "counter"
            for values in series.values
        }
        self._told = dict(self.totals)

    def watch(self, read_index: Callable[[], IndexSize]) -> None:
        """Where the gauges come from; asked at most once a second."""
        self._read_index = read_index

    def watch_schedule(self, read: Callable[[], Mapping[Series, float]]) -> None:
        """Where further gauges come from; asked at most once a second."""
        self._read_schedule = read

    @_safe
    def prefill(self, report: ReuseReport, branch_tokens: int = 0) -> None:
        """Count a request whose report is final: once each.

        Args:
            branch_tokens: the part of ``reused_tokens`` that was a prefix already, an approximate
                one; the rest was copied from donors.
        """
        self._count(REQUESTS, 1, report.decision, report.reason)
        self._count(TOKENS, report.prefix_tokens, "prefix")
        self._count(TOKENS, branch_tokens, "approximate_prefix")
        self._count(TOKENS, report.reused_tokens - branch_tokens, "reused")
        self._count(TOKENS, report.recomputed_tokens, "recomputed")
        self._count(TOKENS, report.new_tokens, "new")
        if report.decision == "reuse":
            self._observe(DONORS, report.donors)

    @_safe
    def fault(self, step: str) -> None:
        """Count a fault that became a miss; ``step`` is one of :data:`STEPS`."""
        self._count(FAULTS, 1, step)

    @_safe
    def planned(self, ms: float) -> None:
        """One request was matched, selected and locked for, in ``ms``."""
        self._observe(PLAN, ms / 1e3)

    @_safe
    def planned_tokens(self, plan: ReusePlan) -> None:
        """A plan is carried out."""
        similar = sum(span.length for span in plan.spans if span.kind == "semantic")
        self._count(PLANNED, plan.edge_tokens, "edge")
        self._count(PLANNED, similar, "similar")
        self._count(PLANNED, plan.matched_tokens - similar - plan.edge_tokens, "run")

    @_safe
    def placed(self, tokens: int, ms: float) -> None:
        """``tokens`` donor values of one batch were copied in ``ms``."""
        self._count(COPIED, tokens)
        self._observe(COPY, ms / 1e3)

    @_safe
    def attained(self, kind: str, tenant: str, took_ms: float, slo_ms: float | None) -> None:
        """A request ended; without an SLO of this kind nothing is counted."""
        if slo_ms is not None:
            self._count(ATTAINED, 1, kind, "met" if took_ms <= slo_ms else "missed", tenant)

    @_safe
    def answered(self, tokens: int, reserved_tokens: int) -> None:
        """An answer is complete."""
        self._count(ANSWERS, 1, "within" if tokens <= reserved_tokens else "beyond")

    @_safe
    def held_back(self) -> None:
        """A request is held back."""
        self._count(HELD, 1)

    @_safe
    def preempted(self, cause: str) -> None:
        """A running request gave way; ``cause`` is one of the label's values."""
        self._count(PREEMPTIONS, 1, cause)

    @_safe
    def swapped(self, direction: str, tokens: int) -> None:
        """A preempted request's values were copied; ``direction`` is one of :data:`DIRECTIONS`."""
        self._count(SWAPS, 1, direction)
        self._count(SWAPPED, tokens, direction)

    @_safe
    def swap_fallback(self, reason: str) -> None:
        """A request is recomputed that was to be swapped; one of :data:`FALLBACKS`."""
        self._count(SWAP_FALLBACKS, 1, reason)

    @_safe
    def tick(self) -> None:
        """Once a scheduler step: set the gauges once a second, write the line once a minute."""
        now = self._clock()
        # A clock that went back restarts both waits; no count is lost by that.
        if self._gauges_at is not None and 0 <= now - self._gauges_at < GAUGE_SECONDS:
            return
        self._gauges_at = now
        size = self._read_index() if self._read_index is not None else None
        if self._exporter is not None:
            gauges = {} if size is None else dict(size.by_series())
            if self._read_schedule is not None:
                gauges |= self._read_schedule()
            for series, value in gauges.items():
                self._exporter.child(series).set(value)
        seconds = now - self._line_at
        if 0 <= seconds < LINE_SECONDS:
            return
        self._line_at = now
        if seconds >= LINE_SECONDS and self._log_lines:
            self._write_line(seconds, size)

    def _count(self, series: Series, amount: float, *values: str) -> None:
        self.totals[series, values] = self.totals.get((series, values), 0) + amount
        if self._exporter is not None:
            self._exporter.child(series, values).inc(amount)

    def _observe(self, series: Series, value: float) -> None:
        if self._exporter is not None:
            self._exporter.child(series).observe(value)

    def _write_line(self, seconds: float, size: IndexSize | None) -> None:
        """What was counted since the last line; nothing when nothing was."""
        since = {key: total - self._told.get(key, 0) for key, total in self.totals.items()}
        self._told = dict(self.totals)
        requests = _sum(since, REQUESTS)
        faults = {
            values[0]: int(number)
            for (series, values), number in since.items()
            if series is FAULTS and number
        }
        if not requests and not faults:
            return
        reusing = _sum(since, REQUESTS, "reuse")
        tokens = ", ".join(
            f"{int(_sum(since, TOKENS, source)):,} {source.replace('_', ' ')}" for source in SOURCES
        )
        logger.info(
            "KVShare, last %.0f s: %d requests, %d with reuse (%.0f %%); prompt tokens: %s; "
            "faults: %s; %s",
            seconds,
            requests,
            reusing,
            100 * reusing / max(requests, 1),
            tokens,
            ", ".join(f"{number} {step}" for step, number in faults.items()) or "none",
            _described(size),
        )


def _sum(
    counts: Mapping[tuple[Series, tuple[str, ...]], float], series: Series, first: str | None = None
) -> float:
    return sum(
        number
        for (each, values), number in counts.items()
        if each is series and (first is None or values[0] == first)
    )


def _described(size: IndexSize | None) -> str:
    if size is None:
        return "no index"
    state = "index given up until the next flush" if size.failed else "index"
    return (
        f"{state}: {size.tokens:,} tokens, {size.namespaces:,} namespaces, "
        f"{size.bytes / 1e6:.1f} MB"
    )


def build_metrics() -> Metrics:
    """For the scheduler process that calls it: exports with ``--enable-metrics``, on the ranks
    that export SGLang's own series; the line is written by the first rank."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel, settings = get_parallel(), get_observability()
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    exporter = None
    if settings.enable_metrics and (first or settings.enable_metrics_for_all_schedulers):
        try:
            exporter = Exporter(series_labels())
        except Exception:
            logger.exception("KVShare exports no metrics; it serves and writes its log line")
    return Metrics(exporter, log_lines=first)


def series_labels() -> dict[str, str]:
    """The labels of SGLang's scheduler series, so that both can be joined (``init_new`` of its
    ``SchedulerMetricsCollectorContext``)."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        # Disaggregation is refused.
        "engine_type": "unified",
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}


def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``Scheduler.get_next_batch_to_run``."""
    plan = original(self, *args, **kwargs)
    metrics = getattr(self.tree_cache, "metrics", None)
    if isinstance(metrics, Metrics):
        metrics.tick()
    return plan
