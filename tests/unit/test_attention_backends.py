"""Which adapter serves which attention backend, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper
from narrowed_rig import Rig

from sglang_kvshare.engine import attention_backends
from sglang_kvshare.engine.attention_backends import row_attention_of
from sglang_kvshare.engine.flashinfer_rows import FlashInferRows
from sglang_kvshare.engine.row_attention import PositionMaskRows
from sglang_kvshare.engine.seams import BACKEND_SEAMS, SeamError
from sglang_kvshare.engine.support import ATTENTION_BACKENDS, Unsupported, attention_refusal
from sglang_kvshare.engine.virtual_requests import VirtualRequests

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Names of the backends whose seams were compared; SGLang itself is not imported here."""
    seen = []
    monkeypatch.setattr(attention_backends, "check_seams", seen.append)
    return seen


@pytest.fixture
def flashinfer(monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


def runner(prefill, decode=None, layers=None):
    rig = Rig([0], [4])
    attentions = layers or [rig.layer(number) for number in range(3)]
    decoder = [SimpleNamespace(self_attn=SimpleNamespace(attn=attn)) for attn in attentions]
    return SimpleNamespace(
        prefill_attention_backend_str=prefill,
        decode_attention_backend_str=decode or prefill,
        attn_backend=rig.backend,
        model=SimpleNamespace(model=SimpleNamespace(layers=decoder)),
    )


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("torch_native", PositionMaskRows),
        ("flashinfer", FlashInferRows),
        ("triton", VirtualRequests),
        ("fa3", VirtualRequests),
    ],
)
def test_each_backend_has_its_adapter(name, adapter, flashinfer, checked):
    # What SGLang calls the backend inside it is a name, and no backend.
    assert type(row_attention_of(runner(name))) is adapter
    assert checked == [BACKEND_SEAMS[name]]


def test_every_supported_backend_is_tried_and_has_seams():
    names = {name for name, _ in ATTENTION_BACKENDS}
    assert names == set(BACKEND_SEAMS) == set(attention_backends._ADAPTERS)
    assert not any(map(attention_refusal, names))


@pytest.mark.parametrize(("prefill", "decode"), [("fa4", "fa4"), ("triton", "intel_amx")])
def test_any_other_is_refused_by_name(prefill, decode):
    refused = decode if prefill == "triton" else prefill
    with pytest.raises(Unsupported, match=f"--attention-backend {refused}: .* torch_native"):
        row_attention_of(runner(prefill, decode))


def test_of_two_backends_the_one_for_extends_is_used():
    two = runner("triton", "flashinfer")
    extends = object()
    two.attn_backend = SimpleNamespace(prefill_backend=extends, decode_backend=object())
    assert row_attention_of(two)._backend is extends


@pytest.mark.parametrize("other", [{"scaling": 0.5}, {"tp_q_head_num": 8}, {"v_head_dim": 4}])
def test_flashinfer_has_one_plan_for_layers_that_are_alike(other, flashinfer):
    rig = Rig([0], [4])
    layers = [rig.layer(0), rig.layer(1)]
    vars(layers[1]).update(other)
    with pytest.raises(Unsupported, match="flashinfer"):
        row_attention_of(runner("flashinfer", layers=layers))
    # Others read each layer's own.
    row_attention_of(runner("triton", layers=layers))


def test_flashinfer_without_what_is_needed_is_refused(flashinfer):
    lacking = runner("flashinfer")
    del lacking.attn_backend.workspace_buffer
    with pytest.raises(SeamError, match="workspace_buffer"):
        row_attention_of(lacking)
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = type("Wrapper", (), {})
    with pytest.raises(SeamError, match="__init__"):
        row_attention_of(runner("flashinfer"))


def test_its_wrappers_share_the_backend_s_workspace(flashinfer):
    rows = row_attention_of(runner("flashinfer"))
    wrapper = rows._turns[0].wrapper(0).wrapper
    assert isinstance(wrapper, BatchPrefillWithPagedKVCacheWrapper)
