"""Extend attention in plain PyTorch (test/registered/unit/layers/attention)."""

import unittest
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 4096


class TestTorchNativeExtend(CustomTestCase):
    def setUp(self):
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def extend(self, lens, *, dtype=torch.float32, window=None, causal=True):
        """Run one batch; returns its output and, by brute force, what it should be."""
        prefixes = torch.tensor([prefix for prefix, _ in lens])
        extends = torch.tensor([extend for _, extend in lens])
        seq_lens = prefixes + extends
        k = self.normal(SLOTS, KV_HEADS, DIM).to(dtype)
        v = self.normal(SLOTS, KV_HEADS, DIM).to(dtype)
        q = self.normal(int(extends.sum()), HEADS, DIM).to(dtype)
        slots = torch.randperm(SLOTS, generator=self.generator)
        rows = torch.zeros(len(lens), int(seq_lens.max()), dtype=torch.int64)
        taken = 0
        for row, length in zip(rows, seq_lens.tolist()):
            row[:length] = slots[taken : taken + length]
            taken += length
        out = torch.empty_like(q)
        backend = object.__new__(TorchNativeAttnBackend)
        backend._run_sdpa_forward_extend(
            q,
            out,
            k,
            v,
            rows,
            torch.arange(len(lens)),
            seq_lens,
            prefixes,
            extends,
            scaling=0.3,
            enable_gqa=True,
            causal=causal,
            sliding_window_size=window,
        )
        wanted, start = torch.empty_like(out), 0
        for row, (prefix, extend) in zip(rows, lens):
            keys, values = (x[row[: prefix + extend]].movedim(0, 1) for x in (k, v))
            padded = torch.zeros(HEADS, prefix + extend, DIM, dtype=dtype)
            padded[:, prefix:] = q[start : start + extend].movedim(0, 1)
            at = torch.arange(prefix + extend)
            mask = None
            if window is not None:
                mask = (at <= at[:, None]) & (at >= at[:, None] - window)
            wanted[start : start + extend] = scaled_dot_product_attention(
                padded[None],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=causal and window is None,
                enable_gqa=True,
                scale=0.3,
            )[0].movedim(0, 1)[prefix:]
            start += extend
        return out, wanted

    LENS = ([(0, 7)], [(1, 1)], [(300, 1), (64, 32)], [(5, 40), (0, 3), (40, 40)], [(700, 1100)])

    def test_as_with_padded_queries(self):
        for lens in self.LENS:
            out, wanted = self.extend(lens)
            torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)

    def test_bfloat16(self):
        for lens in self.LENS:
            out, wanted = self.extend(lens, dtype=torch.bfloat16)
            torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)

    def test_sliding_window(self):
        for lens in self.LENS:
            out, wanted = self.extend(lens, window=20)
            torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)

    def test_encoder(self):
        for lens in ([(0, 30)], [(0, 5), (0, 64)]):
            out, wanted = self.extend(lens, causal=False)
            torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)

    def rows_computed(self, *args, **kwargs):
        rows = []

        def counting(query, *args, **kwargs):
            rows.append(query.shape[2])
            return scaled_dot_product_attention(query, *args, **kwargs)

        name = "scaled_dot_product_attention"
        with patch.object(torch_native_backend, name, counting):
            self.extend(*args, **kwargs)
        return sum(rows)

    def test_no_row_of_a_long_prefix_is_computed(self):
        self.assertEqual(self.rows_computed([(300, 1), (64, 32), (0, 50)]), 83)
        self.assertEqual(self.rows_computed([(900, 1200)]), 1200)
        self.assertEqual(self.rows_computed([(5, 40)], window=20), 40)


if __name__ == "__main__":
    unittest.main()
