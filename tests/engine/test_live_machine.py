"""The real scheduler in process: reuse, aborts in every state, and any order of events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvshare_eval.live.process import in_a_process

#: What one run of the machine does here; ``make soak`` does a hundred thousand steps.
EXAMPLES, STEPS = 6, 30
#: The names of ``live_machine.CONFIGS``. It imports what this process must not.
CONFIGS = [f"page{page}-{mode}" for page in (1, 16, 64) for mode in ("overlap", "normal")]

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("config", CONFIGS)
def test_the_scheduler_under_any_order_of_events(config, tmp_path):
    counts = in_a_process(everything, config, tmp_path)
    # Positive controls: the examples did what they are for.
    assert counts["finished"] > 20, counts
    assert counts["reused tokens"] > 0, counts
    assert counts["prefix tokens"] > 0, counts
    assert counts["texts checked"] > 5, counts
    assert counts["retractions"] > 0, counts
    assert counts["aborted"] > 0, counts
    assert counts["preempted"] > 0, counts
    assert counts["swaps_total in"] > 0, counts
    assert counts["faults_total swap"] == 0, counts


def everything(name: str, folder: Path) -> Counter[str]:
    """All that is done with one scheduler; it takes longest to start."""
    import live_cases
    import live_machine

    assert list(live_machine.CONFIGS) == CONFIGS
    bench = live_machine.build(live_machine.CONFIGS[name], folder)
    try:
        for case in live_cases.CASES:
            bench.live.reset()
            case(bench)
        return live_machine.explore(bench, examples=EXAMPLES, steps=STEPS) + bench.swaps()
    finally:
        bench.live.close()
