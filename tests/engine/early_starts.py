"""Run by a test in a process of its own: starts up to where SGLang would load weights.

Reads ``{name: [flags]}`` from standard input and writes ``{name: outcome}`` as the last line, where
the outcome is what ended the start, or what became of KVShare. Nothing is spawned or loaded.
"""

from __future__ import annotations

import json
import os
import sys

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def outcome(flags: list[str]) -> dict:
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_kvshare.engine.activation import active_config

    os.environ.pop("KVSHARE_RESOLVED", None)
    try:
        record = prepare_server_args(["--skip-tokenizer-init", "--kvshare", *flags])
        record.resolve_once()
    except SystemExit as end:
        return {"ended": str(end.code), "how": "SystemExit"}
    except Exception as error:
        return {"ended": str(error), "how": type(error).__name__}
    args = resolving_view(record)
    return {
        "on": active_config() is not None,
        "tree": args.radix_cache_backend,
        "prefill_graph": args.cuda_graph_backend_prefill,
    }


def outcomes(cases: dict[str, list[str]]) -> dict[str, dict]:
    """In order; the cases whose name says so meet an SGLang in which one symbol is missing."""
    from sglang_kvshare.engine import seams

    expected, found = seams.SEAMS, {}
    for name, flags in cases.items():
        missing = seams.Seam("sglang.srt.server_args.no_such_symbol", None, "this test")
        table = (missing,) if name.startswith("wrong SGLang") else expected
        seams.check_seams.__defaults__ = (table,)
        found[name] = outcome(flags)
    return found


if __name__ == "__main__":
    load_plugins()
    print(json.dumps(outcomes(json.load(sys.stdin))))
