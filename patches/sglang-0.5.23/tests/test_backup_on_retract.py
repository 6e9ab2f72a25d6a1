"""A tree cache that keeps a retracted request's KV (test/registered/unit/mem_cache)."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import release_req, retract_all
from sglang.srt.mem_cache.radix_cache import RadixCache

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class RecordingCache:
    def __init__(self, steps, saved):
        self.steps, self.saved = steps, saved

    def backup_on_retract(self, req):
        self.steps.append(("backup", req))
        return self.saved


class TestBackupOnRetract(CustomTestCase):
    def setUp(self):
        self.steps = []
        self.mode = "null"
        for name, stand_in in (
            ("release_kv_cache", lambda req, *_, **__: self.steps.append(("release", req))),
            ("evict_from_tree_cache", lambda *_: None),
            ("get_disagg", lambda: self.disagg()),
            ("backup_kv_cache", lambda req, *_: self.steps.append(("decode", req)) or True),
        ):
            patcher = patch.object(schedule_batch, name, stand_in)
            patcher.start()
            self.addCleanup(patcher.stop)

    def disagg(self):
        return SimpleNamespace(
            disaggregation_mode=self.mode,
            disaggregation_decode_retraction_backup="cpu_tensor",
        )

    def release(self, *, saved=True, finished=False, **kwargs):
        req = MagicMock()
        req.finished.return_value = finished
        resumable = release_req(
            req=req,
            remaing_req_count=1,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            tree_cache=RecordingCache(self.steps, saved),
            hisparse_coordinator=None,
            **kwargs,
        )
        req.reset_for_retract.assert_called_once_with()
        return resumable, [step for step, seen in self.steps if seen is req]

    def test_the_cache_is_asked_before_the_row_goes(self):
        for saved in (True, False):
            # Without a backup the request is computed again, and goes on all the same.
            self.assertEqual(self.release(saved=saved), (True, ["backup", "release"]))

    def test_it_is_not_asked_for_what_does_not_come_back(self):
        self.assertEqual(self.release(offload_kv=False), (True, ["release"]))
        self.assertEqual(self.release(finished=True), (True, ["release"]))
        retract_all(
            reqs=[MagicMock()],
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            tree_cache=RecordingCache(self.steps, True),
            hisparse_coordinator=None,
            offload_kv=False,
        )
        self.assertNotIn("backup", [step for step, _ in self.steps])

    def test_decode_servers_keep_their_own_backup(self):
        self.mode = "decode"
        self.assertEqual(self.release(), (True, ["decode", "release"]))

    def test_by_default_nothing_is_kept(self):
        self.assertIs(RadixCache.create_simulated().backup_on_retract(MagicMock()), False)


if __name__ == "__main__":
    unittest.main()
