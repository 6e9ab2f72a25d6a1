"""Preempted requests on the real scheduler: copied to host memory and back, or recomputed."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine

#: Every page size in both dtypes, every page size with the overlap scheduler and without.
RUNS = [
    ("page1-overlap", "float32"),
    ("page1-normal", "bfloat16"),
    ("page16-overlap", "bfloat16"),
    ("page16-normal", "float32"),
    ("page64-overlap", "float32"),
    ("page64-normal", "bfloat16"),
]


@pytest.mark.parametrize(("config", "dtype"), RUNS)
def test_a_preempted_request_comes_back_bit_for_bit(config, dtype, tmp_path):
    assert in_a_process(every_case, config, dtype, tmp_path) > 10


def every_case(name: str, dtype: str, folder: Path) -> int:
    import live_machine
    import swap_cases
    from swap_rig import Rig

    # Mixed chunks join requests' rounding; here texts are compared token for token.
    rig = Rig(replace(live_machine.CONFIGS[name], mixed=False), dtype, folder)
    failed = []
    try:
        for number, case in enumerate(swap_cases.CASES):
            rig.begin()
            try:
                case(rig)
            except Exception:
                told = f"case {number}, {case.__qualname__}, counted {rig.counted()}:"
                failed.append(f"{told}\n{traceback.format_exc()}")
        assert not failed, "\n".join(failed)
        return len(swap_cases.CASES)
    finally:
        rig.live.close()
