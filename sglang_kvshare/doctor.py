"""What ``kvshare doctor`` says: would KVShare serve here, and if not, why not.

The answer about a model comes from the start itself: SGLang parses the flags and resolves them with
KVShare's hooks in place, up to where it would begin to load weights.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_kvshare import __version__
from sglang_kvshare.config import ENV_SWITCH, ConfigError, resolve
from sglang_kvshare.engine.support_table import REFUSED, rows

DISTRIBUTION = "sglang-kvshare"
#: (group, name) of the entry points by which SGLang finds this package.
ENTRY_POINTS = (("sglang.srt.plugins", "kvshare"), ("sglang.srt.platforms", "kvshare_cpu"))

GOOD, HINT, BAD = "ok", "note", "no"
_COLOURS = {GOOD: "green", HINT: "yellow", BAD: "red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: the thing.
        state: ``ok``, ``note`` (worth knowing) or ``no`` (the start would end here).
        says: what was found.
        remedy: what to change; empty where there is nothing to do.
    """

    what: str
    state: str
    says: str
    remedy: str = ""


def examine(flags: Sequence[str]) -> list[Finding]:
    """Look at this machine, this environment and what a server would be started with.

    Args:
        flags: arguments of ``sglang.launch_server``; the model is looked at if they name one.
    """
    findings = [_package(), _settings()]
    sglang = _sglang()
    findings += [sglang, *_extras(), _faiss(), *_entry_points()]
    if sglang.state == BAD:
        return findings
    # As at a start with --kvshare: by this the plain-CPU platform is chosen, in this process too.
    os.environ[ENV_SWITCH] = "1"
    with _quiet():
        findings += [_seams(), *_platform()]
        findings.append(_memory(flags))
        if not any(finding.state == BAD for finding in findings):
            findings.append(_start(flags) if _model(flags) else _no_model())
    return findings


def would_start(findings: Sequence[Finding]) -> bool:
    """Whether a server with these flags would serve with KVShare switched on."""
    return all(finding.state != BAD for finding in findings)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For machines."""
    return {
        "kvshare": __version__,
        "would_start": would_start(findings),
        "findings": [asdict(finding) for finding in findings],
        "support": [asdict(row) for row in rows()],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """For people: the table of `docs/support.md`, what was found, and the verdict last."""
    columns = ("", "why", "decided by")
    table = Table("what KVShare serves", *columns, box=box.SIMPLE_HEAD)
    for group, members in groupby(rows(), lambda row: row.group):
        table.add_row(Text(group, style="bold"))
        for row in members:
            status = Text(row.status, style=_COLOURS[BAD if row.status == REFUSED else GOOD])
            table.add_row(Text(f"  {row.what}"), status, Text(row.why), Text(row.decided_by))
        table.add_section()
    console.print(table)
    table = Table("looked at here", "", "found", "what to change", box=box.SIMPLE_HEAD)
    for item in findings:
        state = Text(item.state, style=_COLOURS[item.state])
        table.add_row(Text(item.what), state, Text(item.says), Text(item.remedy))
    console.print(table)
    problems = [item.says for item in findings if item.state == BAD]
    if problems:
        console.print(Text(f"KVShare would not serve: {problems[0]}", style="red"))
    else:
        console.print(Text("KVShare would serve.", style="green"))


# --- without SGLang -----------------------------------------------------------------------------


def _package() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("sglang-kvshare", GOOD, f"{__version__} on Python {python}")


def _settings() -> Finding:
    """``KVSHARE_*`` of this environment; flags are looked at with the model."""
    try:
        resolve(env=os.environ)
    except ConfigError as error:
        return Finding("settings", BAD, str(error), "correct or unset it")
    return Finding("settings", GOOD, "the environment's can be used")


def _sglang() -> Finding:
    from sglang_kvshare.engine.seams import TESTED_VERSION

    remedy = f"pip install sglang=={TESTED_VERSION}, see requirements/README.md"
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Finding("SGLang", BAD, "SGLang is not installed", remedy)
    if found != TESTED_VERSION:
        return Finding("SGLang", HINT, f"{found}, tested is {TESTED_VERSION}", remedy)
    return Finding("SGLang", GOOD, f"{found}, the tested version")


def _extras() -> Iterator[Finding]:
    """Packages that only some commands need, from this package's own list."""
    missing: dict[str, list[str]] = {}
    for line in requires(DISTRIBUTION) or ():
        match = re.match(r"([\w.-]+).*;\s*extra == \"(\w+)\"", line)
        if match and match[2] not in ("dev", "sglang"):
            try:
                version(match[1])
            except PackageNotFoundError:
                missing.setdefault(match[2], []).append(match[1])
    for extra, names in missing.items():
        yield Finding(
            f"optional packages ({extra})",
            HINT,
            f"missing: {', '.join(names)}",
            f"pip install '{DISTRIBUTION}[{extra}]'",
        )
    if not missing:
        yield Finding("optional packages", GOOD, "none is missing")


def _faiss() -> Finding:
    """Imported as the server does when similar donors are wanted; without it they are given up."""
    try:
        found = str(import_module("faiss").__version__)
    except Exception as error:
        says = f"cannot be imported, so that similar_donors finds none: {_line(error)}"
        return Finding("FAISS", HINT, says, "pip install faiss-cpu")
    return Finding("FAISS", GOOD, f"{found}, for similar_donors")


def _entry_points() -> Iterator[Finding]:
    for group, name in ENTRY_POINTS:
        what = f"entry point {name}"
        # SGLang loads only the plug-ins named there, if it is set.
        wanted = os.environ.get("SGLANG_PLUGINS", "").strip()
        if name not in {entry.name for entry in entry_points(group=group)}:
            yield Finding(what, BAD, f"not registered in {group}", f"install {DISTRIBUTION} again")
        elif wanted and name not in [part.strip() for part in wanted.split(",")]:
            says = f"kept out by SGLANG_PLUGINS={wanted}"
            # Without the platform an accelerator still serves; without the plug-in nothing does.
            state = BAD if name == "kvshare" else HINT
            yield Finding(what, state, says, f"add {name} to SGLANG_PLUGINS")
        else:
            yield Finding(what, GOOD, f"registered in {group}")


# --- with SGLang --------------------------------------------------------------------------------


def _seams() -> Finding:
    from sglang_kvshare.engine.seams import SEAMS, SeamError, check_seams

    try:
        check_seams()
    except SeamError as error:
        return Finding("seams", BAD, str(error), "install the tested version of SGLang")
    except Exception as error:
        return Finding("seams", BAD, f"SGLang cannot be imported: {_line(error)}", "repair SGLang")
    return Finding("seams", GOOD, f"all {len(SEAMS)} symbols of SGLang are as expected")


def _platform() -> Iterator[Finding]:
    from sglang.srt.platforms import current_platform

    from sglang_kvshare.engine.cpu_platform import PlainCpuPlatform, fast_bfloat16

    kind = type(current_platform).__name__
    if isinstance(current_platform, PlainCpuPlatform):
        yield Finding("platform", GOOD, "plain PyTorch on the CPU (kvshare_cpu)")
        fast = fast_bfloat16()
        says = "AMX: bfloat16 at full speed" if fast else "no AMX: float32 is faster than bfloat16"
        yield Finding("dtype", GOOD, says)
        return
    device = getattr(current_platform, "device_type", "") or "unknown device"
    if device == "cpu":
        yield Finding("platform", GOOD, f"SGLang's own CPU engine ({kind})")
    else:
        yield Finding("platform", HINT, f"{device} ({kind}): KVShare has been tried on CPUs only")


def _memory(flags: Sequence[str]) -> Finding:
    """What is free, against the weights if they lie in a local folder."""
    import psutil

    free = int(psutil.virtual_memory().available)
    folder = Path(_model(flags) or "")
    weights = (
        sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    )
    says = f"{free / 1e9:.1f} GB free"
    if not weights:
        return Finding("memory", GOOD, says)
    says += f", {weights / 1e9:.2f} GB of weights on disk"
    if weights > free:
        return Finding("memory", HINT, says, "on a CPU they must fit; float32 doubles bfloat16")
    return Finding("memory", GOOD, says)


def _no_model() -> Finding:
    return Finding("model", HINT, "none was named", "add --model-path and the server's flags")


def _start(flags: Sequence[str]) -> Finding:
    """Start a server up to where it would load weights."""
    what = _model(flags) or "model"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            architecture = _resolve(flags)
    except SystemExit as end:
        # argparse prints what is wrong and ends with a number, KVShare ends with a sentence.
        told = end.code if isinstance(end.code, str) else (said.getvalue().strip() or "no reason")
        says = told.splitlines()[-1].removeprefix("KVShare: ")
        return Finding(
            what,
            BAD,
            re.sub(r"^.*?: error: ", "", says),
            "change that; or give --kvshare-optional, and stock SGLang serves",
        )
    except Exception as error:
        return Finding(what, BAD, f"SGLang would not start: {_line(error)}", "correct the flags")
    return Finding(what, GOOD, f"{architecture} would be served with these flags")


def _resolve(flags: Sequence[str]) -> str:
    """
    Returns:
        the class of the model.

    Raises:
        SystemExit: KVShare refuses, or a flag cannot be parsed.
        Exception: SGLang does not take these flags, or does not find the model.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_kvshare.engine.activation import ask, asked_for

    load_plugins()
    record = prepare_server_args([*flags, "--kvshare"])
    # The reason is wanted, not a server without KVShare.
    config = asked_for(record)
    if config is None:
        raise RuntimeError("the hooks on SGLang's command line do not stand")
    ask(record, replace(config, optional=False))
    record.resolve_once()
    return " or ".join(model_config_of(record).hf_config.architectures)


def _model(flags: Sequence[str]) -> str | None:
    """The value of ``--model-path``, in either spelling."""
    for number, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in ("--model-path", "--model"):
            return value if equals else next(iter(flags[number + 1 :]), None)
    return None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of SGLang's start is shown, and nothing of it stands in a machine's JSON."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
