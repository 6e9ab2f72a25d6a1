"""Do estimates of answers' lengths hold what they promise? On a trace, in its order of time.

    python -m kvshare_eval.simulate.lengths --data FOLDER [--trace azure_llm_2023_conv]

Each request is estimated when it comes, by what ended before; its answer is observed when it ends,
at a given time for each token. For each confidence: the share of the answers that ended within
their bound, what the bounds add up to over what the answers do, and of the answers that outgrew the
first bound the share that ended within the next.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvshare_eval.loaders.source import DataSource
from kvshare_eval.loaders.traces import TRACES, TraceRequest, load_trace
from sglang_kvshare.scheduling.length_estimate import (
    Asked,
    Calibration,
    Coverage,
    LengthEstimate,
    LengthEstimator,
)

CONFIDENCES = (0.5, 0.8, 0.9, 0.95, 0.99)
MS_PER_TOKEN = 30.0
MOST_NEW_TOKENS = 2048


@dataclass(frozen=True)
class Kept:
    """What came of one promise.

    Attributes:
        first: of all answers.
        outgrown: answers that outgrew their first bound.
        next_share: of these, within the next bound.
    """

    first: Coverage
    outgrown: int
    next_share: float


def kept(requests: Iterable[TraceRequest], confidence: float) -> Kept:
    """Of estimates with one confidence, the requests being of one namespace."""
    estimator, calibration = LengthEstimator(), Calibration()
    running: list[tuple[float, int, Asked, LengthEstimate, int]] = []
    outgrown = within = 0
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.arrival_s:
            _, _, asked, estimate, tokens = heapq.heappop(running)
            estimator.observe(asked, estimate, tokens)
            calibration.observe(estimate, tokens)
        asked = Asked("trace", request.prompt_tokens, MOST_NEW_TOKENS)
        tokens = min(request.output_tokens, MOST_NEW_TOKENS)
        estimate = estimator.estimate(asked, confidence)
        if tokens > estimate.upper_tokens:
            outgrown += 1
            within += tokens <= estimator.longer(asked, estimate.upper_tokens, confidence)
        ends_s = request.arrival_s + tokens * MS_PER_TOKEN / 1e3
        heapq.heappush(running, (ends_s, number, asked, estimate, tokens))
    (first,) = calibration.report()
    return Kept(first, outgrown, within / max(outgrown, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with the trace's file")
    parser.add_argument("--trace", default="azure_llm_2023_conv", choices=sorted(TRACES))
    args = parser.parse_args()
    requests = list(load_trace(DataSource(args.data), args.trace))
    table = Table(title=f"{args.trace}: {len(requests):,} requests")
    for column in ("promised", "observed", "bounds / answers", "outgrown", "within the next"):
        table.add_column(column, justify="right")
    for confidence in CONFIDENCES:
        told = kept(requests, confidence)
        table.add_row(
            f"{confidence:g}",
            f"{told.first.observed:.3f}",
            f"{told.first.padding:.2f}",
            f"{told.outgrown:,}",
            f"{told.next_share:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
