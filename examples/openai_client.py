"""Ask about documents through the OpenAI client, and see what of them was reused.

    python -m sglang.launch_server --model-path MODEL --kvshare      # in another shell
    python examples/openai_client.py

The second question has the same documents in another order: only their beginning could be an exact
prefix, and the rest is reused at its new offset.
"""

from __future__ import annotations

import argparse
from typing import Any

from openai import OpenAI

DOCUMENTS = {
    "The lighthouse": (
        "The lighthouse of Skarholm was built in 1868 by the brothers Aune on the outermost rock "
        "of the bay. Its lamp stands forty-one metres above the sea and is seen from eighteen "
        "miles away. Four keepers lived there with their families until the lamp was made "
        "electric in 1954; the last of them, Ingrid Moe, wrote down every ship that passed for "
        "thirty-one years."
    ),
    "The railway": (
        "The narrow railway from the harbour to the copper mine at Lian was opened in 1881. Its "
        "nine locomotives drew the ore down by day and the miners home by night. A landslide "
        "closed the upper part in 1926, and the lower part served the sawmill until 1963, when "
        "its last engine, called Little Marta, was given to the school for its yard."
    ),
    "The school": (
        "The school on the hill has two classrooms and a library of six thousand books, most of "
        "them left to it by a ship's doctor in 1907. Every spring the pupils count the birds on "
        "the cliffs; their lists, unbroken since 1912, were printed by the academy in three "
        "volumes, and are still cited."
    ),
}


def prompt(order: list[str], question: str) -> str:
    """A document reads the same in every prompt, wherever it stands."""
    documents = "".join(f"Document: {title}\n{DOCUMENTS[title]}\n\n" for title in order)
    return f"Answer from the documents below.\n\n{documents}Question: {question}"


def ask(client: OpenAI, text: str, kvshare: dict[str, Any]) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=24,
        extra_body={
            # What this request wants of KVShare; leave it out for the server's defaults.
            "custom_params": {"kvshare": kvshare},
            # Ask for the report in the response.
            "return_cached_tokens_details": True,
        },
    )
    print(" ", " ".join((answer.choices[0].message.content or "").split()))
    report = answer.sglext["cached_tokens_details"]["kvshare"]  # type: ignore[attr-defined]
    print(
        f"  prefix {report['prefix_tokens']}, reused {report['reused_tokens']}, "
        f"recomputed {report['recomputed_tokens']}, new {report['new_tokens']} "
        f"({report['decision']}: {report['reason']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a server with --kvshare")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url.rstrip("/") + "/v1", api_key=args.api_key)

    first, second, third = DOCUMENTS
    print("Three documents:")
    ask(client, prompt([first, second, third], "When was the railway opened?"), {})
    print("The same in another order:")
    ask(client, prompt([third, first, second], "Who was the last keeper?"), {})
    print("Once more with reuse off:")
    ask(client, prompt([third, first, second], "Who was the last keeper?"), {"reuse": "off"})


if __name__ == "__main__":
    main()
