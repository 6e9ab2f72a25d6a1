"""sglang.Engine without a server: KVSHARE=1 in the environment switches KVShare on.

    python examples/engine_offline.py --model MODEL

Settings come from KVSHARE_* variables or KVSHARE_CONFIG=FILE.yaml (docs/configuration.md).
"""

from __future__ import annotations

import argparse
import os

# Before sglang.Engine is made; its child processes inherit it.
os.environ.setdefault("KVSHARE", "1")

NOTES = {
    "apples": (
        "The orchard above the mill has sixty apple trees of eleven sorts. The oldest, a red "
        "Gravenstein, was planted by the miller's daughter in 1871 and still bears a hundredweight "
        "in good years. The fruit is picked in the second week of September, pressed the same "
        "evening, and sold as juice at the church fair."
    ),
    "bees": (
        "Behind the orchard stand fourteen hives, kept by the teacher and her pupils. In a warm "
        "summer they give two hundred jars of honey, most of it from lime blossom; in the wet year "
        "of 1987 they gave nine. A swarm that settled in the bell tower was brought home by the "
        "fire brigade in a hat box."
    ),
}


def prompt(order: list[str], question: str) -> str:
    return "".join(f"{NOTES[name]}\n\n" for name in order) + f"Question: {question}\nAnswer:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder or a hub name")
    args = parser.parse_args()

    import sglang

    engine = sglang.Engine(model_path=args.model, max_total_tokens=8192, log_level="warning")
    try:
        for text, settings in (
            (prompt(["apples", "bees"], "When are the apples picked?"), {}),
            (prompt(["bees", "apples"], "How many hives are there?"), {}),
            (prompt(["bees", "apples"], "Who keeps the bees?"), {"reuse": "off"}),
        ):
            answer = engine.generate(
                text,
                {
                    "temperature": 0,
                    "max_new_tokens": 16,
                    "custom_params": {"kvshare": settings},
                },
            )
            report = answer["meta_info"]["cached_tokens_details"]["kvshare"]
            print(" ".join(answer["text"].split()))
            print(
                f"  prefix {report['prefix_tokens']}, reused {report['reused_tokens']}, "
                f"recomputed {report['recomputed_tokens']}, new {report['new_tokens']} "
                f"({report['decision']}: {report['reason']})"
            )
    finally:
        engine.shutdown()


# SGLang starts its processes anew ("spawn"), and each of them imports this file.
if __name__ == "__main__":
    main()
