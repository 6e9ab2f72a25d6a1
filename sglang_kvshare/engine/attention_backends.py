"""Which adapter serves which ``--attention-backend``; chosen once, when the worker is prepared.

Seams: ``ModelRunner.attn_backend``, ``prefill_attention_backend_str`` and
``decode_attention_backend_str``; ``HybridAttnBackend.prefill_backend`` where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_kvshare.engine.flashinfer_contract import WRAPPER, check_wrapper
from sglang_kvshare.engine.flashinfer_rows import FlashInferRows
from sglang_kvshare.engine.row_attention import PositionMaskRows, RowAttention
from sglang_kvshare.engine.seams import BACKEND_SEAMS, SeamError, check_seams
from sglang_kvshare.engine.support import Unsupported, attention_refusal, decoder_layers
from sglang_kvshare.engine.virtual_requests import VirtualRequests

#: Of ``FlashInferAttnBackend``.
FLASHINFER_ATTRIBUTES = ("workspace_buffer", "prefill_backend", "prefill_split_tile_size")


def row_attention_of(runner: Any) -> RowAttention:
    """The adapter for the runner's backend of extends.

    Args:
        runner: SGLang's ``ModelRunner``, loaded.

    Raises:
        Unsupported: the backend, or the model on this backend, is not served.
        SeamError: SGLang's backend or FlashInfer is not as expected.
    """
    name = runner.prefill_attention_backend_str
    for each in (name, runner.decode_attention_backend_str):
        if refusal := attention_refusal(each):
            raise Unsupported(refusal)
    stock = runner.attn_backend
    # Two backends, one for extends and one for decode steps.
    backend = getattr(stock, "prefill_backend", None)
    backend = stock if backend is None or isinstance(backend, str) else backend
    check_seams(BACKEND_SEAMS[name])
    return _ADAPTERS[name](backend, runner)


def _position_mask(backend: Any, runner: Any) -> RowAttention:
    return PositionMaskRows()


def _virtual(backend: Any, runner: Any) -> RowAttention:
    return VirtualRequests(backend)


def _flashinfer(backend: Any, runner: Any) -> RowAttention:
    import flashinfer

    wrapper = getattr(flashinfer, WRAPPER)
    check_wrapper(wrapper)
    if missing := [name for name in FLASHINFER_ATTRIBUTES if not hasattr(backend, name)]:
        raise SeamError(
            f"{type(backend).__name__} has no {missing[0]} (needed for: narrowed attention)"
        )
    # A plan holds for all layers that follow.
    shapes = {
        (a.scaling, a.tp_q_head_num, a.tp_k_head_num, a.qk_head_dim, a.v_head_dim)
        for a in (layer.self_attn.attn for layer in decoder_layers(runner.model))
    }
    if len(shapes) > 1 or any(shape[3] != shape[4] for shape in shapes):
        raise Unsupported(
            "--kvshare does not support layers with different heads on --attention-backend "
            "flashinfer: one plan serves them all"
        )

    def make() -> Any:
        return wrapper(backend.workspace_buffer, "NHD", backend=backend.prefill_backend)

    return FlashInferRows(backend, make)


_ADAPTERS: Mapping[str, Callable[[Any, Any], RowAttention]] = {
    "torch_native": _position_mask,
    "flashinfer": _flashinfer,
    "triton": _virtual,
    "fa3": _virtual,
}
