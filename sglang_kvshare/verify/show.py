"""Tables of a verification, for a person."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_kvshare.verify.checks import Verification
from sglang_kvshare.verify.difference import describe


def show(found: Verification, console: Console) -> None:
    """Print the tables."""
    requests = Table(
        box=SIMPLE_HEAD, pad_edge=False, title=f"Requests to {escape(found.url)} (tokens)"
    )
    requests.add_column("request")
    for name in ("prefix", "reused", "recomputed", "new", "TTFT"):
        requests.add_column(name, justify="right")
    requests.add_column("reason")
    for name, answer in found.answers.items():
        counts = [answer.count("prefix") + answer.count("approximate_prefix")]
        counts += [answer.count(source) for source in ("reused", "recomputed", "new")]
        requests.add_row(name, *map(str, counts), f"{answer.ttft_ms:.0f} ms", escape(answer.reason))
    checks = Table(box=SIMPLE_HEAD, pad_edge=False, title="Checks")
    checks.add_column("check")
    checks.add_column("")
    checks.add_column("found")
    for check in found.checks:
        verdict = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        checks.add_row(check.name, verdict, escape(check.detail))
    console.print(requests)
    console.print(checks)
    off, default = found.answers["off"], found.answers["default"]
    console.print(
        f"Default ratio against reuse off (not judged): {describe(found.default)}; TTFT "
        f"{default.ttft_ms:.0f} ms with reuse, {off.ttft_ms:.0f} ms without, each measured once."
    )
    if default.text is not None and default.text != off.text:
        console.print(f"  with reuse:    {escape(repr(default.text))}")
        console.print(f"  without reuse: {escape(repr(off.text))}")
    for note in found.notes:
        console.print(f"Note: {escape(note)}.")
    verdict = "KVShare works here." if found.ok else "KVShare does NOT work as it should here."
    console.print(verdict, style="bold")
