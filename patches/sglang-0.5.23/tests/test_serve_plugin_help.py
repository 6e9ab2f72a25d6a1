"""`sglang serve --help` with flags of plug-ins (test/registered/unit/cli)."""

import unittest
from unittest.mock import patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.cli import serve as serve_cli

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestServePluginHelp(CustomTestCase):
    def steps(self, *argv):
        steps = []
        with (
            patch("sglang.srt.plugins.load_plugins", lambda: steps.append("plugins")),
            patch.object(serve_cli, "_print_llm_help", lambda _: steps.append("help")),
            patch.object(serve_cli, "_print_diffusion_help", lambda _: None),
        ):
            serve_cli.serve(None, list(argv))
        return steps

    def test_plugins_are_loaded_before_any_help(self):
        for argv in (("--help",), ("-h",), ("--model-type", "llm", "--help")):
            self.assertEqual(self.steps(*argv), ["plugins", "help"], argv)


if __name__ == "__main__":
    unittest.main()
