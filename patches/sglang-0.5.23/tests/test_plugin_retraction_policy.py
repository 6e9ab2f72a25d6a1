"""--retraction-policy with a value of a plug-in (test/registered/unit/managers)."""

import argparse
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.choices import add_retraction_policy_choices
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import (
    ScheduleBatch,
    register_retraction_policy,
)
from sglang.srt.server_args import ServerArgs

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NAME = "test-shortest-prompt-kept"


class TestPluginRetractionPolicy(CustomTestCase):
    def order(self, policy):
        reqs = [
            SimpleNamespace(origin_input_ids=[0] * prompt, output_ids=[0] * output)
            for prompt, output in ((5, 9), (4, 3), (6, 1))
        ]
        schedule = SimpleNamespace(retraction_policy=policy)
        with patch.object(schedule_batch, "get_schedule", return_value=schedule):
            return ScheduleBatch._get_decode_retraction_order(reqs)

    def test_the_plugin_orders(self):
        register_retraction_policy(
            NAME,
            lambda reqs: sorted(range(len(reqs)), key=lambda i: len(reqs[i].origin_input_ids)),
        )
        self.addCleanup(schedule_batch._PLUGIN_RETRACTION_ORDERS.pop, NAME)
        self.assertEqual(self.order(NAME), [1, 0, 2])

    def test_length_is_as_before(self):
        self.assertEqual(self.order("length"), [0, 1, 2])
        for built_in in ("length", "priority"):
            with self.assertRaises(ValueError):
                register_retraction_policy(built_in, lambda reqs: [])

    def test_the_flag_accepts_the_value(self):
        def parse(value):
            parser = argparse.ArgumentParser(exit_on_error=False)
            ServerArgs.add_cli_args(parser)
            args = ["--model-path", "m", "--retraction-policy", value]
            return parser.parse_args(args).retraction_policy

        self.assertEqual(parse("priority"), "priority")
        with self.assertRaises(argparse.ArgumentError):
            parse(NAME)
        add_retraction_policy_choices([NAME])
        self.addCleanup(choices.RETRACTION_POLICY_CHOICES.remove, NAME)
        self.assertEqual(parse(NAME), NAME)


if __name__ == "__main__":
    unittest.main()
