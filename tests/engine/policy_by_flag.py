"""Run by a test in a process of its own, in which SGLang takes schedule policies of plug-ins.

Writes what becomes of starts, up to where SGLang would load weights, and how queues are ordered.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

from sglang.srt import runtime_context
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_kvshare.engine import activation, hooks, ordering


def start(model: str, *flags: str) -> list | str:
    from sglang.srt.arg_groups.overrides import resolving_view

    for name in ("KVSHARE", "KVSHARE_RESOLVED"):
        os.environ.pop(name, None)
    try:
        record = prepare_server_args(["--model-path", model, "--skip-tokenizer-init", *flags])
        record.resolve_once()
    except SystemExit as end:
        return str(end.code)
    config = activation.active_config()
    hooked = any(target.endswith(".calc_priority") for target, _ in hooks.hooks())
    return [resolving_view(record).schedule_policy, config and config.schedule, hooked]


def order(*, priorities: bool) -> str:
    """Of three requests, as the scheduler process would order them."""
    arguments = SimpleNamespace(
        enable_priority_scheduling=priorities, schedule_low_priority_values_first=False
    )
    runtime_context.get_schedule = lambda: arguments
    tree = RadixCache.create_simulated()
    policy = SchedulePolicy("hit-rate", tree, False, priorities, False)
    policy._touch_waiting_prefixes = lambda *_: None
    queue = [
        SimpleNamespace(
            rid=rid, priority=priority, time_stats=SimpleNamespace(wait_queue_entry_time=at)
        )
        for rid, priority, at in (("a", 1, 1.0), ("b", 2, 2.0), ("c", 2, 3.0))
    ]
    policy.calc_priority(queue)
    return "".join(req.rid for req in queue)


def orders() -> dict[str, str]:
    # As in a scheduler whose KVShare was switched off too late to change the arguments.
    os.environ["KVSHARE_RESOLVED"] = activation.OFF
    activation.register_plugin()
    found = {"stock's tree": order(priorities=False)}
    found["stock's tree, priorities"] = order(priorities=True)
    ordering.arranged = lambda tree_cache, queue, sign: queue.reverse() is None
    found["ours"] = order(priorities=False)
    found["ours, priorities"] = order(priorities=True)
    return found


def main(model: str) -> None:
    starts = {
        "by flag": ("--kvshare", "--schedule-policy", "effective-cost"),
        "by default": ("--kvshare",),
        "priorities": ("--kvshare", "--enable-priority-scheduling"),
        "stock's own": ("--kvshare", "--schedule-policy", "lpm"),
        "ours of that name": ("--kvshare", "--kvshare-schedule", "fcfs"),
        "switched off": ("--kvshare", "--kvshare-optional", "--enable-session-radix-cache"),
        "not asked for": (),
        "alone": ("--schedule-policy", "hit-rate"),
        "no such value": ("--kvshare", "--schedule-policy", "nothing"),
    }
    found = {name: start(model, *flags) for name, flags in starts.items()}
    print(json.dumps({"starts": found, "orders": orders()}))


if __name__ == "__main__":
    load_plugins()
    main(sys.argv[1])
