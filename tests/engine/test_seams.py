"""The table of SGLang's symbols: true of the installed version, and loud when it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]


def test_the_installed_sglang_is_as_expected():
    from sglang_kvshare.engine.seams import SEAMS, check_seams, found

    check_seams()
    check_seams(found())
    assert len(SEAMS) > 30
    assert len({seam.symbol for seam in SEAMS}) == len(SEAMS)


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_the_attention_backends_are_as_expected(name):
    from sglang_kvshare.engine.seams import BACKEND_SEAMS, check_seams

    assert BACKEND_SEAMS[name]
    check_seams(BACKEND_SEAMS[name])


def test_what_cannot_be_imported_here_is_read():
    """FA3's backend needs a library of kernels; what the source says is compared."""
    import ast
    from importlib.util import find_spec

    from sglang_kvshare.engine.seams import BACKEND_SEAMS

    for seam in BACKEND_SEAMS["fa3"]:
        module, kind, method = seam.symbol.rsplit(".", 2)
        place = Path(find_spec("sglang").origin).parents[1].joinpath(*module.split("."))
        tree = ast.parse(place.with_suffix(".py").read_text())
        [found] = [
            function
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == kind
            for function in node.body
            if isinstance(function, ast.FunctionDef) and function.name == method
        ]
        assert ", ".join(arg.arg for arg in found.args.args) == seam.parameters


def test_every_hook_and_every_override_has_a_seam():
    """What is hooked must be in the table, or a changed signature is found by a crash."""
    from sglang_kvshare.engine.hooks import hooks, http_hooks
    from sglang_kvshare.engine.seams import PATCH_SEAMS, SEAMS
    from sglang_kvshare.engine.tree_cache import KVShareRadixCache

    known = {seam.symbol for seam in (*SEAMS, *PATCH_SEAMS)}
    for target, _ in (*hooks(), *http_hooks()):
        assert target in known, target
    inherited = {
        name
        for name, value in vars(KVShareRadixCache).items()
        if callable(value)
        and not name.startswith("__")
        and hasattr(KVShareRadixCache.__base__, name)
    }
    assert len(inherited) >= 8
    for name in inherited:
        assert any(symbol.endswith("." + name) for symbol in known), name


@pytest.mark.parametrize("number", range(0, 40, 5))
def test_a_missing_symbol_is_named_with_both_versions(number):
    from importlib.metadata import version

    from sglang_kvshare.engine.seams import SEAMS, TESTED_VERSION, SeamError, check_seams

    seam = SEAMS[number % len(SEAMS)]
    for broken in (
        replace(seam, symbol=seam.symbol + "_gone"),
        replace(seam, symbol="sglang.srt.no_such_module." + seam.symbol.rsplit(".", 1)[1]),
    ):
        with pytest.raises(SeamError) as error:
            check_seams([broken])
        text = str(error.value)
        assert broken.symbol in text
        assert version("sglang") in text
        assert TESTED_VERSION in text
        assert "\n" not in text


def test_a_changed_signature_is_named():
    from sglang_kvshare.engine.seams import SEAMS, SeamError, check_seams

    with_signature = [seam for seam in SEAMS if seam.parameters is not None]
    assert len(with_signature) > 15
    for seam in with_signature:
        for parameters in (seam.parameters + ", more", seam.parameters.replace("self", "it", 1)):
            if parameters == seam.parameters:
                continue
            with pytest.raises(SeamError, match="takes") as error:
                check_seams([replace(seam, parameters=parameters)])
            assert seam.symbol in str(error.value)


def test_a_missing_field_is_named():
    from sglang_kvshare.engine.seams import SEAMS, SeamError, check_seams

    for seam in (seam for seam in SEAMS if seam.fields):
        with pytest.raises(SeamError, match="no_such_field"):
            check_seams([replace(seam, fields=seam.fields + " no_such_field")])


def plain():
    return 1


def hook(original):
    return original() + 1


def test_a_hook_that_is_not_there_is_found(monkeypatch):
    """SGLang logs a hook that it cannot apply and goes on."""
    import sys
    from functools import wraps

    from sglang_kvshare.engine.seams import SeamError, check_hooked

    target = f"{__name__}.plain"
    with pytest.raises(SeamError, match="plain"):
        check_hooked(target, hook)

    def around(function, wanted):
        @wraps(function)
        def wrapper():
            return wanted(function)

        return wrapper

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "plain", around(plain, hook))
    check_hooked(target, hook)
    # Another plug-in's hook around ours leaves it in place.
    monkeypatch.setattr(module, "plain", around(module.plain, lambda original: original()))
    check_hooked(target, hook)
    # One that replaces ours does not.
    monkeypatch.setattr(module, "plain", lambda: 3)
    with pytest.raises(SeamError):
        check_hooked(target, hook)


def test_hooks_are_off_in_this_process():
    """Nothing was asked for here, so that `verify` finds the first hook missing."""
    from sglang_kvshare.engine.hooks import verify
    from sglang_kvshare.engine.seams import SeamError

    with pytest.raises(SeamError, match="not in place"):
        verify()


def test_what_a_patch_adds_is_checked_where_it_is_there():
    from sglang_kvshare.engine.seams import PATCH_SEAMS, SEAMS, SeamError, check_seams, found
    from sglang_kvshare.patching import installation

    states = {
        each.patch.name: each.state == installation.IN
        for each in installation.examine(installation.find())
    }
    by_patch = {
        "schedule-policy-values": PATCH_SEAMS[:3],
        "backup-on-retract": PATCH_SEAMS[3:4],
        "retraction-policy-values": PATCH_SEAMS[4:],
    }
    for name, seams in by_patch.items():
        assert found(seams) == (list(seams) if states[name] else []), name
    # Positive control: what is there is found, and checked like any other.
    with_signature = next(seam for seam in SEAMS if seam.parameters)
    with pytest.raises(SeamError):
        check_seams(found([replace(with_signature, parameters="other")]))
