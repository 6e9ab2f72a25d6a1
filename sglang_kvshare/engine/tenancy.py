"""The tenants of this process: read once, and what of SGLang's arguments does not go with them.

Seam: SGLang's resolved arguments. Every process reads the file that the configuration names, and
the secret that it inherited in its environment.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.activation import active_config
from sglang_kvshare.engine.support import Refusal
from sglang_kvshare.tenants import TenantBook, TenantError, key_digest

#: Key of ``custom_params`` that says whose a request is. The HTTP process writes it over whatever
#: a client sent; the scheduler takes it out.
TENANT_PARAM = "kvshare_tenant"
_BY_HITS = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")

#: What would let a client by, or tell it of another's hits.
TENANT_REFUSALS = (
    Refusal(
        "gRPC (--grpc-port, --smg-grpc-mode, --grpc-mode)",
        "its requests carry no header that names a tenant",
        lambda a: bool(a.grpc_port or a.smg_grpc_mode or a.grpc_mode),
    ),
    Refusal(
        "several tokenizer processes (--tokenizer-worker-num above 1)",
        "tenants are told apart in the process that serves HTTP alone",
        lambda a: a.tokenizer_worker_num > 1,
    ),
    Refusal(
        f"a --schedule-policy that orders by cache hits ({', '.join(_BY_HITS)})",
        "one tenant's hits would move another's requests",
        lambda a: a.schedule_policy in _BY_HITS,
    ),
    Refusal(
        "--enable-custom-logit-processor",
        "a client's code would run beside every tenant's values",
        lambda a: bool(a.enable_custom_logit_processor),
    ),
)


def with_whole_path(config: KVShareConfig) -> KVShareConfig:
    """``config`` whose tenants file is found from any working directory."""
    if not config.tenants:
        return config
    return replace(config, tenants=str(Path(config.tenants).absolute()))


@lru_cache(maxsize=1)
def _kept(path: str) -> TenantBook:
    return TenantBook.read(Path(path), os.environ)


def read(config: KVShareConfig) -> TenantBook | None:
    """Read the tenants that ``config`` names, ``None`` for none; called when a process starts, so
    that what becomes of the file later ends no request.

    Raises:
        TenantError: the file or the secret cannot be used.
    """
    _kept.cache_clear()
    return _kept(config.tenants) if config.tenants else None


def book() -> TenantBook | None:
    """The tenants of this process; ``None`` where the server tells no tenants apart."""
    config = active_config()
    return None if config is None or not config.tenants else _kept(config.tenants)


def check_arguments(args: Any, tenants: TenantBook) -> None:
    """Refuse what does not go together with tenants.

    Args:
        args: SGLang's resolved arguments.

    Raises:
        TenantError: the first thing found.
    """
    for refusal in TENANT_REFUSALS:
        if refusal.applies(args):
            raise TenantError(f"tenants do not go with {refusal.what}: {refusal.why}")
    if args.api_key:
        others = tenants.keys - {key_digest(args.api_key)}
        if others:
            raise TenantError(
                "tenants' api_keys do not go with --api-key: SGLang answers every other key with "
                "HTTP 401 before a tenant is looked for; leave --api-key out (unknown keys are "
                "refused as it is), or name the tenants by `header`"
            )
