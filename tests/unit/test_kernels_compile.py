"""Every kernel compiles for both capabilities without a device, and stays within its means."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing"),
]
#: Of each kernel one; FP8 is converted by bits for the older capability.
NAMES = (
    "copy_rotate bf16 neox",
    "copy_rotate e4m3 neox",
    "check_scores normalisers bf16",
    "check_scores scores bf16",
    "compact_rows bf16",
    "pack_mask",
)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles(name, capability):
    from kvshare_eval.device.compile_cases import cases
    from kvshare_eval.device.compile_report import usage_of

    (case,) = (each for each in cases(capability) if each.name == name)
    compiled = case.compile(capability)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    usage = usage_of(compiled)
    # Nothing is spilled, and an SM has room for two programs at least.
    assert usage.stack_bytes == 0
    assert usage.registers * 32 * case.num_warps * 2 <= 65_536
    assert usage.shared_bytes <= 80 * 1024
    if name != "pack_mask":
        # What a thread can move at once: the compiler has seen that all is aligned.
        assert usage.widest_bytes == 16


def test_widths_are_read_out_of_ptx():
    from kvshare_eval.device.compile_report import widest_bytes

    assert widest_bytes("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];") == 2
    assert widest_bytes("ld.global.L1::evict_first.L2::cache_hint.v4.b32 {") == 16
    assert widest_bytes("st.global.v2.b64 [ %rd1 + 0 ], {") == 16
    assert widest_bytes("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r3;") == 16
    assert widest_bytes("ld.shared.v4.b32 {") == 0
