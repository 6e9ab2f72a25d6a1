"""--schedule-policy with a value of a plug-in (test/registered/unit/managers)."""

import argparse
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.choices import add_schedule_policy_choices
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import (
    SchedulePolicy,
    register_schedule_policy,
)
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.server_args import ServerArgs

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NAME = "test-last-first"


class TestPluginSchedulePolicy(CustomTestCase):
    def setUp(self):
        self.calls = []

        def factory(tree_cache):
            def policy(waiting_queue, running_batch, now):
                self.calls.append((tree_cache, running_batch, now))
                waiting_queue.reverse()

            return policy

        register_schedule_policy(NAME, factory)
        self.addCleanup(schedule_policy._PLUGIN_POLICIES.pop, NAME)
        disagg = SimpleNamespace(disaggregation_mode="null")
        memory = SimpleNamespace(radix_eviction_policy="lru")
        for name, value in (("get_disagg", disagg), ("get_memory", memory)):
            patcher = patch.object(schedule_policy, name, return_value=value)
            patcher.start()
            self.addCleanup(patcher.stop)

    def policy(self, name, priorities=False):
        self.tree_cache = RadixCache.create_simulated()
        return SchedulePolicy(name, self.tree_cache, False, priorities, False)

    def test_the_plugin_orders_the_queue(self):
        for priorities in (False, True):
            queue = [SimpleNamespace(priority=1), SimpleNamespace(priority=2)]
            first, second = queue
            policy, running = self.policy(NAME, priorities), object()
            with patch.object(schedule_policy, "touch_waiting_prefix"):
                policy.calc_priority(queue, running)
            self.assertEqual(queue, [second, first])
            self.assertIs(self.calls[-1][0], self.tree_cache)
            self.assertIs(self.calls[-1][1], running)
            self.assertFalse(policy.waiting_queue_prefix_matched(queue))

    def test_the_clock_is_that_of_the_time_stats(self):
        policy = self.policy(NAME)
        policy.calc_priority([])
        policy.calc_priority([])
        before, after = (now for _, _, now in self.calls)
        self.assertLessEqual(0.0, after - before)

    def test_built_in_policies_are_as_before(self):
        queue = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
        with patch.object(schedule_policy, "touch_waiting_prefix"):
            self.policy("fcfs").calc_priority(queue)
        self.assertEqual([req.rid for req in queue], ["a", "b"])
        self.assertEqual(self.calls, [])
        with self.assertRaises(ValueError):
            register_schedule_policy("lpm", lambda tree_cache: None)
        with self.assertRaises(ValueError):
            self.policy("no-such-policy")

    def test_the_flag_accepts_the_value(self):
        def parse(value):
            parser = argparse.ArgumentParser(exit_on_error=False)
            ServerArgs.add_cli_args(parser)
            args = ["--model-path", "m", "--schedule-policy", value]
            return parser.parse_args(args).schedule_policy

        for built_in in choices.BUILT_IN_SCHEDULE_POLICIES:
            self.assertEqual(parse(built_in), built_in)
        with self.assertRaises(argparse.ArgumentError):
            parse(NAME)
        add_schedule_policy_choices([NAME])
        self.addCleanup(choices.SCHEDULE_POLICY_CHOICES.remove, NAME)
        self.assertEqual(parse(NAME), NAME)


if __name__ == "__main__":
    unittest.main()
