"""The FlashInfer adapter over a stand-in of its wrapper, and the stand-in against the package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from flashinfer_signatures import METHODS, of_callable, read, recorded
from flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper, made
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowed_rig import DIM, HEADS, LAYERS, Rig

from sglang_kvshare.attention.launches import Form, in_runs, in_two_parts, with_mask
from sglang_kvshare.engine import flashinfer_contract, flashinfer_rows
from sglang_kvshare.engine.flashinfer_contract import (
    MASK_INDPTR,
    TESTED_VERSION,
    USED,
    check_wrapper,
)
from sglang_kvshare.engine.flashinfer_rows import TURNS, FlashInferRows
from sglang_kvshare.engine.seams import SeamError

pytestmark = pytest.mark.unit

#: How each form is planned here; which one is chosen is tested with the costs.
FORMS = {
    Form.RUNS: in_runs,
    Form.MASK: partial(with_mask, block_rows=3),
    Form.TWO_PARTS: partial(in_two_parts, block_rows=3),
}
every_form = pytest.mark.parametrize("form", FORMS, ids=[form.value for form in FORMS])


class Planned(FlashInferRows):
    """The adapter with one form only."""

    def __init__(self, form, *args, **more):
        super().__init__(*args, **more)
        self.form = form

    def attend(self, narrowed, rows):
        def choose(positions, counts, **_):
            return FORMS[self.form](positions, counts)

        with patch.object(flashinfer_rows, "choose", choose):
            return super().attend(narrowed, rows)


def adapter(rig, form, **more):
    made()
    return Planned(
        form,
        rig.backend,
        lambda: BatchPrefillWithPagedKVCacheWrapper(
            rig.backend.workspace_buffer, "NHD", backend=rig.backend.prefill_backend
        ),
        **more,
    )


def some(rig, share, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sum(rig.extend.counts), generator=generator) < share


@every_form
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 14)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.integers(0, 1000),
)
def test_it_attends_by_position(form, requests, share, seed):
    rig = Rig([start for start, _ in requests], [count for _, count in requests], seed)
    rows = adapter(rig, form)
    narrowed = rig.narrowed(some(rig, share, seed))
    for layer_id in range(LAYERS):
        given = rig.rows(narrowed, rig.layer(layer_id))
        torch.testing.assert_close(
            rows.attend(narrowed, given), rig.expected(narrowed, given), atol=1e-5, rtol=1e-5
        )


@every_form
def test_the_form_is_the_one_meant(form):
    rig = Rig([5, 0], [20, 12])
    rows = adapter(rig, form)
    narrowed = rig.narrowed(some(rig, 0.5, 3))
    rows.attend(narrowed, rig.rows(narrowed, rig.layer(0)))
    assert rows._plan.form is form
    masks = [wrapper._custom_mask_buf is not None for wrapper in made()]
    wanted = {Form.RUNS: [False], Form.MASK: [True], Form.TWO_PARTS: [False, True]}
    assert masks == wanted[form]


@every_form
def test_a_narrowing_is_planned_once_and_wrappers_take_turns(form):
    rig = Rig([4, 0, 7], [30, 8, 11])
    rows = adapter(rig, form)
    launches = 2 if form is Form.TWO_PARTS else 1
    keep, narrowings, last = some(rig, 0.9, 1), 0, [0] * TURNS * launches
    for _ in range(2 * TURNS + 1):
        # Fewer rows each time, within a forward and from one to the next.
        keep &= some(rig, 0.8, 10 + narrowings)
        narrowed, narrowings = rig.narrowed(keep), narrowings + 1
        before = [wrapper.plans for wrapper in BatchPrefillWithPagedKVCacheWrapper.made]
        for layer_id in range(LAYERS):
            given = rig.rows(narrowed, rig.layer(layer_id))
            torch.testing.assert_close(
                rows.attend(narrowed, given), rig.expected(narrowed, given), atol=1e-5, rtol=1e-5
            )
        wrappers = BatchPrefillWithPagedKVCacheWrapper.made
        planned = [wrapper.plans for wrapper in wrappers]
        fresh = [a - b for a, b in zip(planned, before + [0] * len(planned), strict=False)]
        assert sum(fresh) == launches
        # Never one whose last plan may still be on its way to the device.
        assert not any(a and b for a, b in zip(fresh, last, strict=False))
        last = fresh
        if narrowings % 2:
            rows.end()
    # No wrapper is made after the first turns.
    assert len(wrappers) == TURNS * launches
    assert sum(wrapper.runs for wrapper in wrappers) == narrowings * LAYERS * launches


def test_the_scales_of_an_fp8_pool():
    dtype = torch.float8_e4m3fn
    rig = Rig([3, 0], [12, 9], dtype=dtype)
    narrowed = rig.narrowed(some(rig, 0.5, 2))
    layer = rig.layer(1, k_scale_float=0.25, v_scale_float=2.0)
    given = rig.rows(narrowed, layer)
    wanted = rig.expected(narrowed, given, 0.25, 2.0)
    for form in FORMS:
        found = adapter(rig, form).attend(narrowed, given)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    # The control: the scales matter.
    assert (rig.expected(narrowed, given) - wanted).abs().max() > 0.1


def test_without_our_indptr_a_packed_mask_of_two_entries_would_be_wrong(monkeypatch):
    """Control of the stand-in, and of what the adapter does about FlashInfer's plan."""
    rig = Rig([0, 0], [9, 9])
    narrowed = rig.narrowed(some(rig, 0.7, 4))
    given = rig.rows(narrowed, rig.layer(0))
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "_mask_indptr_buf", Unsettable(), raising=False
    )
    with pytest.raises((AssertionError, IndexError)):
        torch.testing.assert_close(
            adapter(rig, Form.MASK).attend(narrowed, given),
            rig.expected(narrowed, given),
            atol=1e-5,
            rtol=1e-5,
        )


class Unsettable:
    """An attribute that keeps what ``plan`` sets, whatever is set after it."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, owner, kind=None):
        return owner.__dict__["kept indptr"]

    def __set__(self, owner, value):
        # A plan sets it to nothing, and to its own; ours comes third.
        times = owner.__dict__["times"] = owner.__dict__.get("times", 0) + 1
        if times <= 3:
            owner.__dict__["kept indptr"] = value


def test_the_mask_is_packed_by_what_is_given():
    """The kernel takes the place of the reference here."""
    from sglang_kvshare.attention.kernels.pack_mask import pack_mask

    seen = []

    def pack(positions, counts, kv_lengths):
        assert sum(counts) == len(positions)
        assert len(counts) == len(kv_lengths)
        seen.append(positions.dtype)
        return pack_mask(positions, counts, kv_lengths)

    rig = Rig([2], [20])
    narrowed = rig.narrowed(some(rig, 0.6, 1))
    rows = adapter(rig, Form.MASK, pack=pack)
    for layer_id in range(LAYERS):
        rows.attend(narrowed, rig.rows(narrowed, rig.layer(layer_id)))
    assert seen == [torch.int64]


def test_a_fixed_tile_of_deterministic_inference_is_handed_on():
    rig = Rig([2], [20])
    rig.backend.prefill_split_tile_size = 4096
    narrowed = rig.narrowed(some(rig, 0.6, 1))
    seen = []

    class Listening(BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, fixed_split_size=None, **kwargs):
            seen.append(fixed_split_size)
            super().plan(*args, **kwargs)

    rows = FlashInferRows(
        rig.backend, lambda: Listening(rig.backend.workspace_buffer, "NHD", backend="fa2")
    )
    rows.attend(narrowed, rig.rows(narrowed, rig.layer(0)))
    assert set(seen) == {4096}


# --- the contract with the package ----------------------------------------------------------------


def test_the_stand_in_has_the_recorded_signatures():
    told = recorded()
    assert told["version"] == TESTED_VERSION
    assert set(told["methods"]) == set(METHODS)
    for name, parameters in told["methods"].items():
        assert of_callable(getattr(BatchPrefillWithPagedKVCacheWrapper, name)) == parameters, name
    for alias, name in told["aliases"].items():
        wrapper = BatchPrefillWithPagedKVCacheWrapper
        assert getattr(wrapper, alias) is getattr(wrapper, name)
    assert MASK_INDPTR in told["plan_sets"]


def test_the_installed_package_has_the_recorded_signatures():
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("FlashInfer is not installed: it needs CUDA")
    installed = importlib.metadata.version("flashinfer-python")
    if installed != TESTED_VERSION:
        pytest.skip(f"FlashInfer {installed} is installed, recorded is {TESTED_VERSION}")
    told = read(Path(found.origin).with_name("prefill.py").read_text())
    assert told == {name: value for name, value in recorded().items() if name in told}


def test_signatures_are_read_from_a_source_as_from_an_import():
    """Positive control of reading: this very stand-in, by its source."""
    import flashinfer_stand_in

    told = read(Path(flashinfer_stand_in.__file__).read_text())
    assert told["methods"] == recorded()["methods"]
    assert told["aliases"] == recorded()["aliases"]


def test_what_the_adapter_gives_is_in_the_recorded_signatures():
    check_wrapper(BatchPrefillWithPagedKVCacheWrapper)


@pytest.mark.parametrize("method", USED)
def test_another_signature_is_refused_by_name(method):
    class Other(BatchPrefillWithPagedKVCacheWrapper):
        pass

    setattr(Other, method, lambda self, q: None)
    with pytest.raises(SeamError, match=rf"{method}.*FlashInfer .*tested with {TESTED_VERSION}"):
        check_wrapper(Other)


def test_a_plan_that_keeps_masks_elsewhere_is_refused():
    class Other(BatchPrefillWithPagedKVCacheWrapper):
        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            packed_custom_mask=None,
            causal=False,
            sm_scale=None,
            q_data_type=None,
            kv_data_type=None,
            non_blocking=True,
            fixed_split_size=None,
        ):
            self.mask = packed_custom_mask

    with pytest.raises(SeamError, match=MASK_INDPTR):
        check_wrapper(Other)


def test_the_version_is_told(monkeypatch):
    monkeypatch.setattr(flashinfer_contract, "version", lambda name: "9.9")
    assert flashinfer_contract.installed_version() == "9.9"


def test_the_output_has_the_shape_that_the_model_goes_on_with():
    rig = Rig([0], [6])
    narrowed = rig.narrowed(torch.ones(6, dtype=torch.bool))
    given = rig.rows(narrowed, rig.layer(0))
    for form in FORMS:
        assert adapter(rig, form).attend(narrowed, given).shape == (6, HEADS * DIM)
