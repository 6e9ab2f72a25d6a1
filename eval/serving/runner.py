"""Carry out a plan of windows, resume it, and say how it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshare_eval import interruptible
from kvshare_eval.errors import EvalError
from kvshare_eval.run_dir import RunDir
from kvshare_eval.serving.load import Measured
from kvshare_eval.serving.plan import (
    Arrivals,
    Spec,
    Window,
    arrivals,
    auto_rates,
    rotated,
    windows_of,
)
from kvshare_eval.serving.record import WindowRecord
from kvshare_eval.serving.sides import Side
from kvshare_eval.serving.summary import line, summarize
from kvshare_eval.serving.sweep import CALIBRATION, Sweep, baseline_of, clients_of
from kvshare_eval.serving.tokens import Corpus, Tokens, kv_bytes_per_token
from kvshare_eval.serving.window import ClientSettings, measure

#: ``--slo-*-ms auto``: this many times what stock takes for one request alone.
SLO_FACTOR = 3.0
_WARM_UPS = 2

Say = Callable[[str], None]


class Runner:
    """Measures a sweep on sides whose servers run.

    Args:
        sides: by name, in the order of the first repeat.
        sweep: what is measured.
        corpus: what prompts are made of.
        settings: how load is sent.
        run: where records go, open.
        earlier: records of the same run before it was resumed.
        say: prints one line.
    """

    def __init__(
        self,
        sides: Mapping[str, Side],
        sweep: Sweep,
        corpus: Corpus,
        settings: ClientSettings,
        run: RunDir,
        *,
        earlier: Sequence[Mapping[str, Any]] = (),
        say: Say = print,
    ) -> None:
        self._sides = sides
        self._sweep = sweep
        self._corpus = corpus
        self._settings = settings
        self._run = run
        self._say = say
        self._earlier = {record["key"]: record for record in earlier}
        self._clients = clients_of(sweep, settings.model)
        self._baseline = baseline_of(list(sides), sweep)
        self._kv_bytes: dict[str, int | None] = {}

    def prepare(self) -> None:
        """Check and warm up every server, and note what it says of itself."""
        first = Window(self._sweep.specs[0], None, CALIBRATION)
        prompt_tokens = self._arrivals(first).load.prompt_tokens
        for name, side in self._sides.items():
            tokens = Tokens(self._corpus, f"{self._sweep.seed}/warm-up of {name}")
            for _ in range(_WARM_UPS):
                side.probe(tokens.new(prompt_tokens))
            facts = side.server_facts()
            per_token = kv_bytes_per_token(self._settings.model, self._kv_dtype(facts))
            self._kv_bytes[name] = per_token
            record = {"type": "server", "key": f"server/{name}", "side": name, **facts}
            self._run.append({**record, "kv_bytes_per_token": per_token})

    def windows(self) -> list[tuple[Window, str]]:
        """Every window and side that is still to be measured, in order.

        Calibrates first where rates or limits are automatic.
        """
        planned: list[Window] = []
        for spec in self._sweep.specs:
            # A trace has its own times: only limits need what a request takes alone.
            needed = self._sweep.slo.auto or not spec.workload.arrivals
            calibration = self._calibration(spec) if self._baseline and needed else {}
            self._note_slo(spec, calibration)
            rates = self._sweep.rates
            if rates is None and spec.workload.arrivals:
                rates = ()
            elif rates is None:
                rates = auto_rates(calibration["service_rate"], self._sweep.multiples)
            planned += windows_of(spec, rates, self._sweep.repeats)
        planned.sort(key=lambda window: window.repeat)
        return [
            (window, side)
            for window in planned
            for side in rotated(list(self._sides), window.repeat)
            if window.key(side) not in self._run.done
        ]

    def requests_of(self, window: Window) -> int:
        """How many requests the window sends."""
        return len(self._arrivals(window).load.requests)

    def measure(self, window: Window, side: str, done: Callable[[], None]) -> WindowRecord:
        """Measure one window on one side and write it down, the window last.

        A window that is cut short leaves requests without their window: a reader ignores them, and
        the next run writes them anew.
        """
        made, key = self._arrivals(window), window.key(side)
        client = self._clients[window.spec.text]
        got = interruptible.run(
            measure(
                self._sides[side],
                made,
                self._settings,
                client=client,
                window=key,
                name=window.name(self._sweep.seed),
                done=done,
            )
        )
        per_token = self._kv_bytes.get(side)
        peak = got.kv_tokens_peak
        record = WindowRecord(
            key=key,
            workload=window.spec.text,
            side=side,
            rate=made.rate,
            reusable_share=made.load.reusable_share,
            prompt_tokens=made.load.prompt_tokens,
            repeat=window.repeat,
            seconds=got.measured.seconds,
            scheduler_cpu_s=got.scheduler_cpu_s,
            kv_tokens_peak=peak,
            kv_bytes_peak=peak * per_token if peak is not None and per_token else None,
            client=client,
        )
        self._write_requests(got.measured)
        self._run.append(record.to_dict())
        summary = summarize(got.measured.records, got.measured.seconds)
        self._say(line(record, summary))
        if summary.warning:
            self._say(f"  warning: {summary.warning}")
        return record

    def _calibration(self, spec: Spec) -> Mapping[str, Any]:
        """What the baseline takes for this workload one request at a time, measured once a run."""
        key = f"calibration/{spec.text}"
        if key in self._earlier:
            return self._earlier[key]
        assert self._baseline is not None
        window = Window(spec, None, CALIBRATION)
        made = self._arrivals(window)
        load = type(made.load)(made.load.warm_up, made.load.requests[: self._sweep.amount.closed])
        got = interruptible.run(
            measure(
                self._sides[self._baseline],
                Arrivals(load, None, None),
                self._settings,
                client="own",
                window=key,
                name=window.name(self._sweep.seed),
                done=lambda: None,
            )
        ).measured
        summary = summarize(got.records, got.seconds)
        if summary.ttft_p50_ms is None or summary.errors:
            raise EvalError(f"{key}: {summary.errors} of {len(got.records)} requests failed")
        self._write_requests(got)
        record = {
            "type": "calibration",
            "key": key,
            "workload": spec.text,
            "side": self._baseline,
            "requests": len(got.records),
            "service_rate": summary.throughput,
            "ttft_ms": summary.ttft_p50_ms,
            "tbt_ms": summary.tbt_p50_ms,
        }
        self._run.append(record)
        self._say(
            f"{spec.text}: {self._baseline} serves {summary.throughput:.3g} requests/s one at a "
            f"time, TTFT {summary.ttft_p50_ms:.0f} ms"
        )
        return record

    def _note_slo(self, spec: Spec, calibration: Mapping[str, Any]) -> None:
        key, slo = f"slo/{spec.text}", self._sweep.slo
        if key in self._run.done or (slo.ttft_ms is None and slo.tbt_ms is None):
            return
        limits = {"ttft_ms": slo.ttft_ms, "tbt_ms": slo.tbt_ms}
        for name, limit in limits.items():
            if limit == "auto":
                alone = calibration[name]  # no gaps where only one token is generated
                limits[name] = None if alone is None else SLO_FACTOR * alone
        self._run.append({"type": "slo", "key": key, "workload": spec.text, **limits})

    def _arrivals(self, window: Window) -> Arrivals:
        return arrivals(window, self._corpus, self._sweep.seed, self._sweep.amount)

    def _write_requests(self, measured: Measured) -> None:
        for record in measured.records:
            self._run.append(record.to_dict())

    @staticmethod
    def _kv_dtype(facts: Mapping[str, Any]) -> str:
        pool = str(facts.get("kv_cache_dtype", "auto"))
        return str(facts.get("dtype", "auto")) if pool == "auto" else pool
