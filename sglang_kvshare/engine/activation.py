"""Switching KVShare on: from the command line, the environment, or a parent process.

Seams: ``ServerArgs.add_cli_args``, ``ServerArgs.from_cli_args``, ``ServerArgs.resolve_once``.
The resolved configuration travels to SGLang's child processes in one environment variable,
because plug-ins run there before any argument is known.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import lru_cache
from typing import Any

from sglang_kvshare.config import (
    ENV_RESOLVED,
    ENV_SWITCH,
    ConfigError,
    KVShareConfig,
    cli_flag,
    from_json,
    option_fields,
    resolve,
    switched_on,
)

BACKEND = "kvshare"
_PREFIX = "kvshare_"


def register_plugin() -> None:
    """Add the flags; install everything else only when KVShare was asked for."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.server_args.ServerArgs."
    HookRegistry.register(target + "add_cli_args", _add_cli_args, HookType.AROUND)
    HookRegistry.register(target + "from_cli_args", _from_cli_args, HookType.AROUND)
    HookRegistry.register(target + "resolve_once", _resolve_once, HookType.AROUND)
    if ENV_RESOLVED in os.environ or switched_on(os.environ):
        _activate(active_config() or resolve(env=os.environ))


def active_config() -> KVShareConfig | None:
    """The configuration of this process, or ``None`` while KVShare is off."""
    text = os.environ.get(ENV_RESOLVED)
    return _parsed(text) if text else None


# Asked for with every request, so that the text is parsed once.
_parsed = lru_cache(maxsize=4)(from_json)


def _activate(config: KVShareConfig) -> None:
    """Install all hooks in this process and hand the configuration to its children."""
    from sglang_kvshare.engine.hooks import install

    os.environ[ENV_SWITCH] = "1"
    os.environ[ENV_RESOLVED] = config.to_json()
    install()


def _add_cli_args(original: Any, parser: argparse.ArgumentParser) -> None:
    original(parser)
    group = parser.add_argument_group("KVShare")
    group.add_argument(
        "--kvshare",
        action="store_true",
        help="Reuse cached passages at any position of a prompt (sglang-kvshare).",
    )
    group.add_argument(
        "--kvshare-config",
        metavar="FILE.yaml",
        help="KVShare settings; the flags below and KVSHARE_* variables win over the file.",
    )
    for spec in option_fields():
        group.add_argument(
            cli_flag(spec.name),
            dest=_PREFIX + spec.name,
            type=type(spec.default),
            default=None,
            choices=spec.metadata.get("choices"),
            help=f"{spec.metadata['doc']} Default: {spec.default}.".replace("%", "%%"),
        )


def _from_cli_args(original: Any, cls: Any, args: argparse.Namespace) -> Any:
    given = {
        spec.name: value
        for spec in option_fields()
        if (value := getattr(args, _PREFIX + spec.name, None)) is not None
    }
    yaml_path = getattr(args, "kvshare_config", None)
    try:
        if getattr(args, "kvshare", False) or switched_on(os.environ):
            _activate(resolve(cli=given, env=os.environ, yaml_path=yaml_path))
        elif given or yaml_path:
            names = [cli_flag(name) for name in given] or ["--kvshare-config"]
            raise ConfigError(f"{names[0]} does nothing without --kvshare")
    except ConfigError as error:
        sys.exit(f"KVShare: {error}")
    record = original(cls, args)
    record._kvshare_from_cli = True
    return record


def _resolve_once(original: Any, record: Any) -> None:
    """Select the tree cache before SGLang resolves its arguments, and check them after."""
    if active_config() is None or getattr(record, "_resolution_finished", False):
        return original(record)
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_kvshare.engine.hooks import install_http
    from sglang_kvshare.engine.seams import SeamError, check_seams
    from sglang_kvshare.engine.support import Unsupported, check_arguments

    try:
        check_seams()
        if record.radix_cache_backend is None:
            record.radix_cache_backend = BACKEND
        if record.cuda_graph_backend_prefill is None:
            # A narrowed extend changes its row count between layers; no captured graph can.
            record.cuda_graph_backend_prefill = "disabled"
        original(record)
        check_arguments(resolving_view(record))
        if getattr(record, "_kvshare_from_cli", False):
            install_http()
    except (SeamError, Unsupported) as error:
        if getattr(record, "_kvshare_from_cli", False):
            sys.exit(f"KVShare: {error}")
        raise
    return None
