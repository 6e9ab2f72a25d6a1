"""What forwards and copies take on a machine.

    prefill   max(least, floor + row * rows + pair * pairs)      pairs = sum of rows * context
    decode    floor + request * batch + context * context_tokens
    copy      floor + bytes / bandwidth, each way by itself

Every scheduling pass takes ``pass`` on top. Time is counted in whole picoseconds: sums over many
decode steps are then exact in closed form, and steps that are jumped over end at the very moment
at which single steps would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from kvshare_eval.errors import EvalError

PS_PER_MS = 1_000_000_000
_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Costs:
    """A machine and a model; times in milliseconds.

    Attributes:
        name: of the preset.
        pass_ms: the scheduler's own time for a pass, which no forward hides.
        prefill_least_ms: no prefill takes less: the weights are read in any case.
        prefill_floor_ms, prefill_row_ms, prefill_pair_ms: see above.
        place_token_ms: moving a reused token to its new place.
        decode_floor_ms, decode_request_ms, decode_context_ms: see above.
        copy_floor_ms: of one copy between pool and host.
        out_bytes_per_ms, in_bytes_per_ms: copy bandwidths.
        kv_bytes_per_token: of all layers, keys and values.
        pool_tokens: the KV pool that the server gives itself.
        chunked_prefill_tokens, max_prefill_tokens, max_running: the server's own defaults.
        about: what was measured or derived, and from where.
    """

    name: str
    prefill_floor_ms: float
    prefill_row_ms: float
    prefill_pair_ms: float
    decode_floor_ms: float
    decode_request_ms: float
    decode_context_ms: float
    kv_bytes_per_token: int
    pool_tokens: int
    pass_ms: float = 0.0
    prefill_least_ms: float = 0.0
    place_token_ms: float = 0.0
    copy_floor_ms: float = 0.0
    out_bytes_per_ms: float = 1e7
    in_bytes_per_ms: float = 1e7
    chunked_prefill_tokens: int = 8192
    max_prefill_tokens: int = 16384
    max_running: int = 256
    about: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise EvalError(f"costs {self.name}: {field.name}={value} must not be below 0")
        if self.decode_ms(1, 1) <= 0 or self.prefill_ms(1, 1) <= 0:
            raise EvalError(f"costs {self.name}: a forward takes some time")
        if self.out_bytes_per_ms <= 0 or self.in_bytes_per_ms <= 0 or self.pool_tokens < 1:
            raise EvalError(f"costs {self.name}: bandwidths and pool_tokens must be above 0")

    # --- in milliseconds, as policies ask ------------------------------------------------------

    def prefill_ms(self, rows: float, pairs: float) -> float:
        ms = self.prefill_floor_ms + self.prefill_row_ms * rows + self.prefill_pair_ms * pairs
        return max(self.prefill_least_ms, ms)

    def decode_ms(self, batch: int, context_tokens: float) -> float:
        return (
            self.decode_floor_ms
            + self.decode_request_ms * batch
            + self.decode_context_ms * context_tokens
        )

    def out_ms(self, tokens: int) -> float:
        return self.copy_floor_ms + tokens * self.kv_bytes_per_token / self.out_bytes_per_ms

    def in_ms(self, tokens: int) -> float:
        return self.copy_floor_ms + tokens * self.kv_bytes_per_token / self.in_bytes_per_ms

    # --- in picoseconds, as the machine counts -------------------------------------------------

    @cached_property
    def pass_ps(self) -> int:
        return round(self.pass_ms * PS_PER_MS)

    @cached_property
    def decode_ps(self) -> tuple[int, int, int]:
        """Floor with the pass, for a request, for a token of context."""
        floor, request, context = (
            round(ms * PS_PER_MS)
            for ms in (self.decode_floor_ms, self.decode_request_ms, self.decode_context_ms)
        )
        return floor + self.pass_ps, request, context

    def prefill_ps(self, rows: float, pairs: float, placed_tokens: int) -> int:
        """With the pass and the placing of reused tokens."""
        ms = self.prefill_ms(rows, pairs) + self.place_token_ms * placed_tokens
        return round(ms * PS_PER_MS) + self.pass_ps

    # --- files ---------------------------------------------------------------------------------

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        """
        Raises:
            EvalError: a key that is unknown or missing, or a value of the wrong kind.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise EvalError(
                f"{where}: unknown {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise EvalError(f"{where}: {error}") from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=100)

    def with_pool(self, tokens: int | None) -> Costs:
        return self if tokens is None else replace(self, pool_tokens=tokens)


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def load_costs(name: str) -> Costs:
    """A preset by name, or a YAML file that ``calibrate`` wrote.

    Raises:
        EvalError: neither, or a file that does not hold costs.
    """
    path = _PRESETS / f"{name}.yaml" if name in presets() else Path(name)
    if not path.is_file():
        raise EvalError(f"costs {name}: no such file; presets are {', '.join(presets())}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise EvalError(f"{path.name}: {error}") from None
    if not isinstance(values, dict):
        raise EvalError(f"{path.name}: must hold keys and values")
    return Costs.of(values, path.name)
