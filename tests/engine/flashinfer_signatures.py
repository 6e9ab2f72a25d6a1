"""The signatures of FlashInfer's paged prefill wrapper, read from its source without importing it.

    python tests/engine/flashinfer_signatures.py VERSION .../flashinfer/prefill.py \
        > tests/engine/flashinfer_wrapper.json

records those of a version; what is compared with them is the stand-in, the adapter, and the
installed package where there is one.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
METHODS = ("__init__", "plan", "forward", "run")
RECORDED = Path(__file__).with_name("flashinfer_wrapper.json")


def recorded() -> dict[str, Any]:
    """What the data file holds."""
    return dict(json.loads(RECORDED.read_text()))


def read(source: str) -> dict[str, Any]:
    """Of a ``prefill.py``: parameters of the methods, other names of them, and which attributes
    with a mask a plan sets."""
    wrapper = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == WRAPPER
    )
    # Of an overloaded function the last definition is the one that is called.
    functions = {node.name: node for node in wrapper.body if isinstance(node, ast.FunctionDef)}
    return {
        "methods": {name: _parameters(functions[name].args) for name in METHODS},
        "aliases": {
            target.id: node.value.id
            for node in wrapper.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            for target in node.targets
            if isinstance(target, ast.Name)
        },
        "plan_sets": sorted(
            {
                node.attr
                for node in ast.walk(functions["plan"])
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and "mask" in node.attr
            }
        ),
    }


def _parameters(args: ast.arguments) -> str:
    """``a, b=1, *, c=None``, without annotations and without ``self``."""
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    return ast.unparse(args).removeprefix("self, ")


def of_callable(function: Any) -> str:
    """The same of a function that is at hand."""
    signature = inspect.signature(inspect.unwrap(function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(bare))[1:-1]


def main(version: str, path: str) -> None:
    told = {"version": version, "class": WRAPPER, **read(Path(path).read_text())}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
