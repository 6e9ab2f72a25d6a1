"""Compile every kernel for both capabilities, and print what each takes: no device is needed.

    python -m kvshare_eval.device.compile_report

Registers are of a thread, shared memory of a program; a stack that is not 0 bytes means that
registers are spilled to memory. The widest access is that of the PTX: 16 bytes are the most.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from kvshare_eval.device.compile_cases import CAPABILITIES, Case, cases


@dataclass(frozen=True)
class Usage:
    """
    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; what is spilled.
        shared_bytes: of a program.
        widest_bytes: of what one thread loads from or stores to global memory at once.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    widest_bytes: int


def usage_of(compiled: CompiledKernel) -> Usage:
    """
    Raises:
        ValueError: ``cuobjdump`` says something else than expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise ValueError(f"cuobjdump: {told}")
    return Usage(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=int(compiled.metadata.shared),
        widest_bytes=widest_bytes(compiled.asm["ptx"]),
    )


def widest_bytes(ptx: str) -> int:
    accesses = re.findall(r"(?:ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b", ptx)
    # From global to shared memory: cp.async.cg.shared.global [to], [from], 0x10, ...
    copies = re.findall(r"cp\.async\.c[ag]\.[^\[]*\[[^]]*\], \[[^]]*\], (\w+)", ptx)
    widths = [int(count or 1) * int(bits) // 8 for count, bits in accesses]
    return max(widths + [int(size, 0) for size in copies], default=0)


def table() -> str:
    """Markdown: a row for each kernel, a group of columns for each capability."""
    columns = [dict(_measured(capability)) for capability in CAPABILITIES]
    titles = ["registers", "stack", "shared", "widest"]
    head = [f"{title}, sm_{capability}" for capability in CAPABILITIES for title in titles]
    lines = [" | ".join(["", "kernel", *head, ""]).strip(), "|---" * (len(head) + 1) + "|"]
    for name in columns[0]:
        cells = [
            str(number)
            for told in (column[name] for column in columns)
            for number in (
                told.registers,
                told.stack_bytes,
                told.shared_bytes,
                told.widest_bytes,
            )
        ]
        lines.append(" | ".join(["", name, *cells, ""]).strip())
    return "\n".join(lines)


def _measured(capability: int) -> list[tuple[str, Usage]]:
    def one(case: Case) -> tuple[str, Usage]:
        return case.name, usage_of(case.compile(capability))

    return [one(case) for case in cases(capability)]


if __name__ == "__main__":
    print(f"Triton {triton.__version__}\n")
    print(table())
