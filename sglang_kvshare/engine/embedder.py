"""Sketches by a sentence model: the text of each window, embedded on the CPU.

Seam: ``TpModelWorker.tokenizer``, with which the scheduler process decodes a window's tokens.

It takes the place of :class:`sglang_kvshare.matching.sketch.Sketcher` and costs hundreds of times
as much: tens of milliseconds a window, in the scheduler's thread. Every rank has a model of its own
and embeds the same texts in the same batches, so that all come to the same sketches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sglang_kvshare.engine.support import Unsupported
from sglang_kvshare.matching.sketch import (
    Float32Array,
    TokenRarity,
    Windows,
    of_unit_length,
    windows_of,
)
from sglang_kvshare.plan import Int64Array

PACKAGE = "sentence_transformers"
_REMEDY = "pip install 'sglang-kvshare[embedder]'"
#: Texts that go through the model together; more take more memory and are no faster.
_BATCH = 32


class SentenceModel(Protocol):
    """What is used of ``sentence_transformers.SentenceTransformer``."""

    max_seq_length: int | None

    def encode(self, sentences: list[str], **options: Any) -> Float32Array:
        """fp32 ``[texts, dims]``."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""


class EmbeddingSketcher:
    """Turns tokens into sketches by what a sentence model makes of their text.

    Rarity is not asked for: the model knows which words matter. A window says nothing if its text
    is empty, as that of special tokens is.

    Args:
        model: on the CPU.
        tokenizer: of the model that is served.
        size_tokens: length of a window, at least 2, in the served model's tokens.
    """

    # Texts that have nothing to do with each other are more alike to it than to input embeddings.
    min_similarity = 0.7

    def __init__(self, model: SentenceModel, tokenizer: Any, *, size_tokens: int = 64) -> None:
        if size_tokens < 2:
            raise ValueError(f"size_tokens={size_tokens}: the least is 2")
        self.size_tokens = size_tokens
        self._model = model
        self._tokenizer = tokenizer
        # Two texts of different length: what cannot be padded fails here and not in a request.
        self.dims = int(self._embedded(["one", "one and another"]).shape[1])

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._model.parameters())

    def sketch(
        self, tokens: Int64Array, rarity: TokenRarity, wanted: Windows | None = None
    ) -> tuple[Windows, Float32Array]:
        """See :meth:`sglang_kvshare.matching.sketch.WindowSketcher.sketch`."""
        windows = windows_of(tokens.shape[0], self.size_tokens) if wanted is None else wanted
        texts = self._texts(tokens, windows)
        said = np.array([bool(text) for text in texts], dtype=np.bool_)
        windows = windows.only(said)
        if not len(windows):
            return windows, np.zeros((0, self.dims), dtype=np.float32)
        return of_unit_length(windows, self._embedded([text for text in texts if text]))

    def _texts(self, tokens: Int64Array, windows: Windows) -> list[str]:
        parts = zip(windows.start.tolist(), windows.end.tolist(), strict=True)
        return [
            self._tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=True).strip()
            for start, end in parts
        ]

    def _embedded(self, texts: Sequence[str]) -> Float32Array:
        with _one_thread():
            vectors = self._model.encode(
                list(texts),
                batch_size=_BATCH,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        told = np.asarray(vectors, dtype=np.float32)
        if not np.isfinite(told).all():
            raise ValueError("the embedder gave values that are not finite")
        return told


def check_embedder(name: str) -> None:
    """Refuse what can be known before anything is loaded; ``""`` is always served.

    Raises:
        Unsupported: the extra is not installed, or there is no such folder.
    """
    if not name:
        return
    if find_spec(PACKAGE) is None:
        raise Unsupported(f"embedder={name!r} needs a package that is missing: {_REMEDY}")
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise Unsupported(
            f"embedder={name!r} is no folder: allowed are a folder or the name of a model that "
            f"sentence-transformers loads ({_REMEDY})"
        )


def load_embedder(name: str, tokenizer: Any, size_tokens: int) -> EmbeddingSketcher:
    """The sketcher of ``embedder=name``.

    Args:
        tokenizer: of the served model; ``None`` where the server has none.

    Raises:
        Unsupported: see :func:`check_embedder`; it cannot be loaded, or windows are too long for
            it, or there is no tokenizer.
    """
    check_embedder(name)
    if tokenizer is None:
        raise Unsupported(
            f"embedder={name!r} reads text, and with --skip-tokenizer-init there is none"
        )
    # Its tokenizer's threads, too, would take the model's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        # What is sampled must not depend on a model that was loaded beside the served one.
        with torch.random.fork_rng(devices=[]):
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(
                str(Path(name).expanduser()) if name.startswith("~") else name,
                device="cpu",
                model_kwargs={"dtype": torch.float32},
            )
        sketcher = EmbeddingSketcher(model, tokenizer, size_tokens=size_tokens)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unsupported(
            f"embedder={name!r} cannot be loaded as a sentence model ({_REMEDY}; a folder, or the "
            f"name of a model): {reason}"
        ) from error
    longest = model.max_seq_length
    if longest is not None and longest < size_tokens:
        raise Unsupported(
            f"embedder={name!r} reads {longest} tokens at most: sketch_tokens={size_tokens} is more"
        )
    return sketcher


@contextmanager
def _one_thread() -> Iterator[None]:
    """A thread of its own would wait for the model's; the model's number is set back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
