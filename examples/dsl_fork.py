"""SGLang's frontend language: fork over a shared document, twice, under different instructions.

    python -m sglang.launch_server --model-path MODEL --kvshare      # in another shell
    python examples/dsl_fork.py

The branches of one fork share an exact prefix, which stock SGLang reuses as well. The second
program puts the document behind a longer instruction: there it is no prefix any more, and KVShare
reuses it at its new offset.
"""

from __future__ import annotations

import argparse

import sglang as sgl

DOCUMENT = (
    "Minutes of the harbour board, 3 May. The board met at nine in the customs house; Ms Lind took "
    "the chair. The dredging of the inner basin is two weeks late, because the barge from Torhavn "
    "lost its crane in the storm of 18 April. The contractor offers to work on Sundays at no extra "
    "cost and expects to end on 12 June. The board accepts this, on the condition that the ferry "
    "keeps its timetable. The fee for pleasure boats stays at 14 crowns a night; a proposal to "
    "raise it to 18 was turned down by five votes to two. Mr Aune reports that the new lamp on the "
    "western pier uses a fifth of the power of the old one and that the eastern pier should follow "
    "before winter. The treasurer was asked for an estimate by the next meeting, on 7 June.\n\n"
)
QUESTIONS = (
    "When does the dredging end?",
    "What is the fee for pleasure boats?",
    "Which pier has the new lamp?",
)


@sgl.function
def ask_all(s, instruction):  # type: ignore[no-untyped-def]
    s += instruction + "\n\n" + DOCUMENT
    # A fork has the server compute what is there already; without this it may not be there yet.
    s.sync()
    branches = s.fork(len(QUESTIONS))
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += f"Question: {question}\nAnswer:"
        branch += sgl.gen("answer", max_tokens=16, temperature=0, stop="\n")
    # Asking for a variable waits for it; until here the branches run at the same time.
    return [(branch["answer"], branch.get_meta_info("answer")) for branch in branches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a server with --kvshare")
    parser.add_argument("--api-key", help="the server's --api-key, if it has one")
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url, api_key=args.api_key))

    for instruction in (
        "Read the minutes.",
        "You are the clerk of the harbour. A visitor asks about the last meeting; read the minutes "
        "of it, which follow here, and answer shortly.",
    ):
        print(instruction)
        state = ask_all.run(instruction=instruction)
        for question, (answer, meta) in zip(QUESTIONS, state.ret_value, strict=True):
            report = meta["cached_tokens_details"]["kvshare"]
            print(f"  {question} {answer.strip()}")
            print(
                f"    prefix {report['prefix_tokens']}, reused {report['reused_tokens']}, "
                f"recomputed {report['recomputed_tokens']}, new {report['new_tokens']} "
                f"({report['decision']}: {report['reason']})"
            )


if __name__ == "__main__":
    main()
