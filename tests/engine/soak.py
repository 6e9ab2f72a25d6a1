"""The state machine for long: ``make soak``, or

    python tests/engine/soak.py [--steps N] [--minutes M] [--config page16-overlap] [--seed S]

Goes round the configurations, a new seed each time, each in a process of its own. A failure ends
the run with the shortest sequence that shows it, its seed, and the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kvshare_eval.live.process import ChildFailed, in_a_process

EXAMPLES, STEPS_PER_EXAMPLE = 50, 60


def explore_once(name: str, random_seed: int, steps: int) -> Counter[str]:
    """About ``steps`` steps of one configuration from one seed."""
    import live_machine

    with tempfile.TemporaryDirectory() as folder:
        bench = live_machine.build(live_machine.CONFIGS[name], Path(folder))
        try:
            return live_machine.explore(
                bench,
                examples=max(1, steps // STEPS_PER_EXAMPLE),
                steps=STEPS_PER_EXAMPLE,
                random_seed=random_seed,
            )
        finally:
            bench.live.close()


def main() -> int:
    from test_live_machine import CONFIGS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="steps in all")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--config", choices=CONFIGS, help="this one only")
    parser.add_argument("--seed", type=int, help="of the first round; random if not given")
    args = parser.parse_args()
    random_seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    configs = [args.config] if args.config else CONFIGS
    began, total = time.monotonic(), Counter()
    share = EXAMPLES * STEPS_PER_EXAMPLE
    while total["steps"] < args.steps:
        minutes = (time.monotonic() - began) / 60
        if minutes > args.minutes:
            print(f"stopped after {minutes:.0f} minutes")
            break
        name = configs[random_seed % len(configs)]
        steps = min(share, args.steps - total["steps"])
        try:
            total += in_a_process(explore_once, name, random_seed, steps)
        except ChildFailed as error:
            print(error)
            print(
                f"failed: {name}, seed {random_seed}; repeat with\n  {Path(sys.executable).name} "
                f"{sys.argv[0]} --config {name} --seed {random_seed} --steps {steps}"
            )
            return 1
        print(
            f"{total['steps']:7d} steps, {(time.monotonic() - began) / 60:5.1f} min, "
            f"{name} seed {random_seed}: {total['finished']} requests, "
            f"{total['texts checked']} texts checked, {total['reused tokens']} tokens reused, "
            f"{total['retractions']} retractions, {total['aborted']} aborts",
            flush=True,
        )
        random_seed += 1
    for what, count in sorted(total.items()):
        print(f"{count:9d}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
