"""Switching KVShare on: from the command line, the environment, or a parent process.

Seams: ``ServerArgs.add_cli_args``, ``ServerArgs.from_cli_args``, ``ServerArgs.resolve_once``,
``sglang.srt.arg_groups.overrides`` (``resolving_view``, ``model_config_of``).

What was asked for travels on the record of the arguments until SGLang resolves it. There KVShare
is accepted or refused, once, and the outcome travels to the child processes in one environment
variable, because plug-ins run there before any argument is known.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import sys
from functools import lru_cache
from typing import Any

from sglang_kvshare.config import (
    ENV_RESOLVED,
    ENV_SWITCH,
    ConfigError,
    KVShareConfig,
    choices_of,
    cli_flag,
    from_json,
    option_fields,
    resolve,
    switched_on,
)
from sglang_kvshare.engine import schedule_policy_values

logger = logging.getLogger(__name__)

BACKEND = "kvshare"
#: Value of ``KVSHARE_RESOLVED`` when KVShare was asked for and could not serve.
OFF = "off"
_PREFIX = "kvshare_"
_ASKED = "_kvshare_asked"


def register_plugin() -> None:
    """Add the flags; install everything else only in the children of a start that was accepted."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.server_args.ServerArgs."
    HookRegistry.register(target + "add_cli_args", _add_cli_args, HookType.AROUND)
    HookRegistry.register(target + "from_cli_args", _from_cli_args, HookType.AROUND)
    HookRegistry.register(target + "resolve_once", _resolve_once, HookType.AROUND)
    schedule_policy_values.offer()
    if active_config() is not None:
        from sglang_kvshare.engine.hooks import install

        install()
    elif ENV_RESOLVED in os.environ:
        # It was switched off when --schedule-policy could not be changed any more.
        schedule_policy_values.register()


def active_config() -> KVShareConfig | None:
    """The configuration of this process, or ``None`` while KVShare is off."""
    text = os.environ.get(ENV_RESOLVED, OFF)
    return None if text == OFF else _parsed(text)


# Asked for with every request, so that the text is parsed once.
_parsed = lru_cache(maxsize=4)(from_json)


def switch_off() -> None:
    """From now on every hook of this process and its children passes through to SGLang."""
    os.environ[ENV_RESOLVED] = OFF


def off_sentence(reason: object) -> str:
    """The one warning of a server that goes on without KVShare."""
    return f"KVShare is off, stock SGLang serves: {reason}"


# --- the command line ---------------------------------------------------------------------------


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
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction}
            if isinstance(spec.default, bool)
            else {"type": type(spec.default), "choices": choices_of(spec) or None}
        )
        group.add_argument(
            cli_flag(spec.name),
            dest=_PREFIX + spec.name,
            # Not given is not the same as the default: the environment or a file may say it.
            default=None,
            help=f"{spec.metadata['doc']} Default: {spec.default}.".replace("%", "%%"),
            **kind,
        )


def _from_cli_args(original: Any, cls: Any, args: argparse.Namespace) -> Any:
    given = {
        spec.name: value
        for spec in option_fields()
        if (value := getattr(args, _PREFIX + spec.name, None)) is not None
    }
    yaml_path = getattr(args, "kvshare_config", None)
    asked = None
    try:
        wanted = getattr(args, "kvshare", False) or switched_on(os.environ)
        schedule_policy_values.take(getattr(args, "schedule_policy", ""), given, wanted)
        if wanted:
            asked = resolve(cli=given, env=os.environ, yaml_path=yaml_path)
        elif given or yaml_path:
            names = [cli_flag(name) for name in given] or ["--kvshare-config"]
            raise ConfigError(f"{names[0]} does nothing without --kvshare")
    except ConfigError as error:
        sys.exit(f"KVShare: {error}")
    record = original(cls, args)
    if asked is not None:
        ask(record, asked)
        # By this the children choose the plain-CPU platform, with KVShare or without it.
        os.environ[ENV_SWITCH] = "1"
    return record


def ask(record: Any, config: KVShareConfig) -> None:
    """Ask for KVShare on a command line's ``ServerArgs`` that are not resolved yet."""
    # SGLang lets attributes with an underscore through that are none of its fields.
    setattr(record, _ASKED, config)


def asked_for(record: Any) -> KVShareConfig | None:
    """What the command line behind ``record`` asked for; ``None`` without ``--kvshare``."""
    return getattr(record, _ASKED, None)


# --- accepted or refused ------------------------------------------------------------------------


def _resolve_once(original: Any, record: Any) -> None:
    """Hook: SGLang resolves its arguments, and KVShare is accepted, refused or switched off."""
    if getattr(record, "_resolution_finished", False):
        return original(record)
    from sglang.srt.arg_groups.overrides import resolving_view

    config = asked_for(record)
    from_cli = config is not None
    if config is None and switched_on(os.environ):
        config = resolve(env=os.environ)
    if config is None:
        return original(record)

    from sglang_kvshare.engine import tenancy
    from sglang_kvshare.engine.embedder import check_embedder
    from sglang_kvshare.engine.seams import SeamError
    from sglang_kvshare.engine.support import Unsupported
    from sglang_kvshare.tenants import TenantError

    config = schedule_policy_values.agree(record, tenancy.with_whole_path(config))
    try:
        tenants = tenancy.read(config)
        check_embedder(config.embedder if config.similar_donors else "")
        if config.optional:
            # Resolution cannot be taken back, so that a copy shows what would become of it.
            _resolve_accepted(original, copy.deepcopy(record))
        _resolve_accepted(original, record)
        if tenants is not None:
            tenancy.check_arguments(resolving_view(record), tenants)
        _activate(config, from_cli)
    except (SeamError, Unsupported, TenantError) as error:
        if not config.optional:
            if from_cli:
                sys.exit(f"KVShare: {error}")
            raise
        switch_off()
        if not getattr(record, "_resolution_finished", False):
            if record.radix_cache_backend == BACKEND:
                record.radix_cache_backend = None
            schedule_policy_values.give_up(record)
            original(record)
        logger.warning("%s", off_sentence(error))
    return None


def _resolve_accepted(original: Any, record: Any) -> None:
    """Resolve ``record`` with KVShare in it.

    Raises:
        SeamError: the installed SGLang is not as expected.
        Unsupported: the arguments or the model's configuration are not served.
    """
    from sglang_kvshare.engine.hooks import register_backend
    from sglang_kvshare.engine.seams import check_seams, found

    check_seams()
    check_seams(found())
    register_backend()
    if record.radix_cache_backend is None:
        record.radix_cache_backend = BACKEND
    try:
        original(record)
    except Exception:
        # SGLang may trip over what KVShare refuses, and then says less of it.
        _check_resolved(record, complete=False)
        raise
    _check_resolved(record, complete=True)


def _check_resolved(record: Any, *, complete: bool) -> None:
    """Refuse by the resolved arguments and by the model's configuration.

    Args:
        complete: resolution came to its end; otherwise what cannot be read yet is left out.

    Raises:
        Unsupported: see :func:`check_arguments`, :func:`check_model_facts`,
            :func:`check_chosen` and :func:`rope_refusal_from_config`.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    from sglang_kvshare.engine.geometry import rope_refusal_from_config
    from sglang_kvshare.engine.support import (
        Unsupported,
        check_arguments,
        check_chosen,
        check_model_facts,
        model_facts,
    )

    args = resolving_view(record)
    check_arguments(args)
    facts = rope = None
    if str(args.model_path).lower() not in ("none", "dummy"):
        with contextlib.nullcontext() if complete else contextlib.suppress(Exception):
            # SGLang has built it for its own decisions and keeps it on the record.
            config = model_config_of(record)
            facts = model_facts(config)
            rope = rope_refusal_from_config(config.hf_config, config.context_len)
    if facts is not None:
        check_model_facts(facts)
    if rope is not None:
        raise Unsupported(rope)
    check_chosen(args)


def _activate(config: KVShareConfig, from_cli: bool) -> None:
    """Install all hooks in this process and hand the configuration to its children.

    Raises:
        SeamError: a hook does not stand.
    """
    from sglang_kvshare.engine import verdict
    from sglang_kvshare.engine.hooks import install, install_http, install_launcher

    os.environ[ENV_SWITCH] = "1"
    os.environ[ENV_RESOLVED] = config.to_json()
    verdict.expect(ends_process=from_cli)
    install()
    install_launcher()
    # With tenants no way of launching a server may leave them out.
    if from_cli or config.tenants:
        install_http()
