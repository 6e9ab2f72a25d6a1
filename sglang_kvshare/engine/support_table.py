"""The table of `docs/support.md` and `kvshare doctor`, made of the facts in `support.py`.

``python -m sglang_kvshare.engine.support_table > docs/support.md`` writes the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from sglang_kvshare.engine import support

SUPPORTED, REFUSED = "supported", "refused"
ARGUMENTS, CONFIG, LOADED = "arguments", "model config", "loaded model"
_NO_CHECK = "-"


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        group: what kind of thing it is.
        what: the thing.
        status: ``supported`` or ``refused``.
        why: the reason, in one phrase.
        decided_by: what it is seen from.
    """

    group: str
    what: str
    status: str
    why: str
    decided_by: str


def rows() -> tuple[Row, ...]:
    """All of the table, in order."""
    return tuple(_rows())


def _rows() -> Iterator[Row]:
    group = "Model classes"
    for name, why in support.MODEL_CLASSES:
        yield Row(group, name, SUPPORTED, why, LOADED)
    yield Row(group, "every other class", REFUSED, "narrowing knows the layers of these", CONFIG)

    group = "Architecture"
    for refusal in support.MODEL_REFUSALS:
        yield Row(group, refusal.what, REFUSED, refusal.why, CONFIG)
    yield Row(group, "logit soft-capping", REFUSED, "narrowed attention does not cap", LOADED)

    group = "RoPE"
    for name, why in support.SUPPORTED_ROPE_KINDS:
        yield Row(group, name, SUPPORTED, why, LOADED)
    for name, why in support.REFUSED_ROPE_KINDS:
        yield Row(group, name, REFUSED, why, LOADED)
    yield Row(group, "every other kind", REFUSED, "how it rotates is not known", LOADED)

    group = "KV pool"
    yield Row(group, "MHATokenToKVPool", SUPPORTED, "slots, heads, dimension", LOADED)
    yield Row(group, "every other pool or layout", REFUSED, "its slots are not known", LOADED)

    group = "KV dtype"
    for name in ("float32", "bfloat16", "float16"):
        yield Row(group, name, SUPPORTED, "keys are rotated in float32, rounded once", LOADED)
    for name in ("fp8_e4m3", "fp8_e5m2"):
        why = "keys are dequantised, rotated, rounded again: see docs/how-it-works.md"
        yield Row(group, name, SUPPORTED, why, LOADED)

    group = "Attention"
    for name, why in support.ATTENTION_BACKENDS:
        yield Row(group, f"--attention-backend {name}", SUPPORTED, why, ARGUMENTS)

    group = "Arguments"
    for refusal in (*support.ARGUMENT_REFUSALS, *support.CHOSEN_REFUSALS):
        yield Row(group, refusal.what, REFUSED, refusal.why, ARGUMENTS)
    why = "ranks plan alike and choose by the scores of all heads; tried with two on a CPU"
    yield Row(group, "--tp-size above 1", SUPPORTED, why, _NO_CHECK)
    why = "each replica has an index of its own; tried with two on a CPU"
    yield Row(group, "--dp-size above 1", SUPPORTED, why, _NO_CHECK)

    group = "Device"
    yield Row(group, "CPU", SUPPORTED, "all tests run on one", _NO_CHECK)
    yield Row(group, "accelerators", SUPPORTED, "not tried yet; the log says so", _NO_CHECK)


def markdown(table: Iterable[Row] | None = None) -> str:
    """The text of `docs/support.md`."""
    lines = [_INTRODUCTION.strip()]
    for group, members in groupby(rows() if table is None else table, lambda row: row.group):
        lines += ["", f"## {group}", "", "| what | | why | decided by |", "|---|---|---|---|"]
        lines += [
            f"| {row.what} | {row.status} | {row.why} | {row.decided_by} |" for row in members
        ]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """
# What KVShare serves

What is refused stops the start with one sentence that names it and the reason. What the arguments
or the model's configuration decide is refused before any weight is loaded; what only the loaded
model shows is refused by the scheduler process, and that sentence is then the last line.

With `--kvshare-optional` (or `KVSHARE_OPTIONAL=1`, or `optional: true` in the YAML file) nothing of
this stops the start: KVShare switches itself off with a warning that gives the reason, and stock
SGLang serves. The same holds when the installed SGLang is not as expected.

`kvshare doctor --model-path MODEL [flags of the server]` makes the same checks without loading
weights, and prints this table.
"""


if __name__ == "__main__":
    print(markdown(), end="")
