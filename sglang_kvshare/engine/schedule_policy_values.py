"""``--schedule-policy hit-rate``, where a patch to SGLang lets plug-ins add values to that flag.

    with the patch      SchedulePolicy calls the policy registered here
    without             a hook around SchedulePolicy.calc_priority does the same (ordering.py)

Seams (of the patch ``schedule-policy-values``): ``add_schedule_policy_choices``,
``register_schedule_policy``. With the patch ``--kvshare-schedule`` and ``--schedule-policy`` are
two names of one setting; SGLang's own values of the latter stand, but for its default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_kvshare.config import ConfigError, KVShareConfig, cli_flag

#: Values of ``--kvshare-schedule`` that SGLang has no policy of that name for.
VALUES = ("hit-rate", "effective-cost")
_DEFAULT = "fcfs"


def offered() -> bool:
    """Whether the patch is applied."""
    from sglang.srt.arg_groups import choices

    return hasattr(choices, "add_schedule_policy_choices")


def offer() -> None:
    """Add the values to the flag's choices. Safe to call again."""
    if offered():
        from sglang.srt.arg_groups import choices

        known = choices.SCHEDULE_POLICY_CHOICES
        choices.add_schedule_policy_choices([name for name in VALUES if name not in known])


def take(policy: str, given: dict[str, Any], asked: bool) -> None:
    """Make ``--schedule-policy`` of a command line a KVShare setting in ``given``.

    Raises:
        ConfigError: KVShare was not asked for, or another setting was given as well.
    """
    if policy not in VALUES:
        return
    if not asked:
        raise ConfigError(f"--schedule-policy {policy} needs --kvshare")
    if given.setdefault("schedule", policy) != policy:
        flag = f"{cli_flag('schedule')} {given['schedule']}"
        raise ConfigError(f"--schedule-policy {policy} and {flag} contradict each other")


def agree(record: Any, config: KVShareConfig) -> KVShareConfig:
    """Bring SGLang's argument and the setting together, before the arguments are resolved.

    Args:
        record: ``ServerArgs``; its ``schedule_policy`` is set where ours is to stand.
    """
    if record.schedule_policy in VALUES:
        return replace(config, schedule=record.schedule_policy)
    if offered() and record.schedule_policy == _DEFAULT and config.schedule in VALUES:
        record.schedule_policy = config.schedule
    return config


def give_up(record: Any) -> None:
    """Stock SGLang is going to serve, which has no such policy."""
    if record.schedule_policy in VALUES:
        record.schedule_policy = _DEFAULT


def stands_in(config: KVShareConfig | None) -> bool:
    """Whether the order of the queue needs no hook."""
    return config is not None and config.schedule in VALUES and offered()


def register() -> None:
    """Register the policies, in a process that schedules. Safe to call again."""
    if offered():
        from sglang.srt.managers.schedule_policy import register_schedule_policy

        for name in VALUES:
            register_schedule_policy(name, _policy)


def _policy(tree_cache: Any) -> Any:
    """``policy(waiting_queue, running_batch, now)`` for one scheduler; see the patch."""
    from sglang.srt.runtime_context import get_schedule

    from sglang_kvshare.engine.ordering import arranged

    arguments = get_schedule()
    sign = 0
    if arguments.enable_priority_scheduling:
        sign = -1 if arguments.schedule_low_priority_values_first else 1

    def policy(waiting_queue: list[Any], running_batch: Any, now: float) -> None:
        # The time comes from the schedule's own clock, which ranks agree on.
        if not arranged(tree_cache, waiting_queue, sign) and sign:
            # As stock's fcfs does.
            waiting_queue.sort(
                key=lambda req: (-sign * req.priority, req.time_stats.wait_queue_entry_time)
            )

    return policy
