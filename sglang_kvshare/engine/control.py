"""The operator's questions, answered by every scheduler.

    HTTP process                      scheduler, every rank             HTTP process
    GetInternalStateReq(rid=...)  ->  hook of get_internal_state  ->    GetInternalStateReqOutput
    by SGLang's own communicator      on the scheduler's thread         of every replica

Seams: ``GetInternalStateReq.rid`` (a text that SGLang leaves empty in this message; any other
message of this kind is answered by SGLang), ``GetInternalStateReqOutput.internal_state``,
``Scheduler.get_internal_state``, ``TokenizerManager.get_internal_state_communicator``.

A message reaches all ranks of a replica in the same place of their event loops, between two steps:
nothing is matched or held half way. The first rank answers, after all have compared their answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from sglang_kvshare.engine.retention import Retention
from sglang_kvshare.engine.state import state_of
from sglang_kvshare.engine.tree_cache import KVShareRadixCache
from sglang_kvshare.engine.tree_snapshot import Asked, UnknownNamespace, snapshot

logger = logging.getLogger(__name__)

MARK = "kvshare-control:"
#: Of an answer; what ranks must agree on leaves out what each measures for itself.
ANSWER = "kvshare"
#: Beside it: who says so. Answers arrive in any order.
REPLICA = "replica"
_MEASURED = frozenset({"took_ms", "idle_s"})


class Refused(ValueError):
    """A question that cannot be answered; the message names the field and the allowed values."""


def message(question: Mapping[str, Any]) -> Any:
    """The message that carries ``question`` to the schedulers."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    return GetInternalStateReq(rid=MARK + json.dumps(question))


def get_internal_state(original: Any, self: Any, recv_req: Any) -> Any:
    """Hook of ``Scheduler.get_internal_state``."""
    rid = getattr(recv_req, "rid", None)
    if not isinstance(rid, str) or not rid.startswith(MARK):
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    try:
        told = answer(self, json.loads(rid.removeprefix(MARK)))
    except (Refused, UnknownNamespace) as error:
        told = {"error": str(error), "status": 400}
    except Exception as error:
        logger.exception("KVShare could not answer the operator")
        told = {"error": f"{type(error).__name__}: {error}", "status": 500}
    told["ranks_agree"] = _all_ranks_say(self, told)
    return GetInternalStateReqOutput(
        internal_state={ANSWER: told, REPLICA: getattr(self.tree_cache, "replica", 0)}
    )


def answer(scheduler: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank says.

    Raises:
        Refused: no such tenant.
        UnknownNamespace: no such namespace.
    """
    cache = scheduler.tree_cache
    if not isinstance(cache, KVShareRadixCache):
        raise Refused("KVShare is off on this server: stock SGLang serves")
    cache.retention.expire()
    if question["what"] == "tree":
        asked = Asked(bytes.fromhex(question["key"]), question["most"], question["namespace"])
        return snapshot(cache, asked)
    return _forget(scheduler, cache, question["tenant"])


def _forget(scheduler: Any, cache: KVShareRadixCache, tenant: str) -> dict[str, Any]:
    known = sorted({*cache.limits, *cache.retention.nodes.tenants})
    if tenant not in known:
        allowed = ", ".join(known[:20]) or "none: this server was started without tenants"
        raise Refused(f"tenant={tenant!r}: allowed are {allowed}")
    told = asdict(cache.retention.forget(tenant))
    running, tokens = _running(scheduler, cache.retention, tenant)
    left = told["left_in_tree"] + told["left_in_index"] + told["left_windows"] + tokens
    return {
        "tenant": tenant,
        **told,
        "running_requests": running,
        "left_in_running_requests": tokens,
        "left_tokens": left,
    }


def _running(scheduler: Any, retention: Retention, tenant: str) -> tuple[int, int]:
    """Requests that began before their tenant was forgotten, and the tokens that they hold of
    their own: these are in no tree, and go when the requests end."""
    batches = [scheduler.running_batch, getattr(scheduler, "last_batch", None)]
    reqs = [req for batch in batches if batch is not None for req in batch.reqs]
    reqs.append(getattr(scheduler, "chunked_req", None))
    held = {}
    for req in reqs:
        state = None if req is None else state_of(req)
        if state is None or state.tenant != tenant or not retention.outlived(state):
            continue
        if req.kv.holds_kv:
            held[id(req)] = req.kv.kv_allocated_len - req.kv.cache_protected_len
    return len(held), sum(held.values())


def _all_ranks_say(scheduler: Any, told: Mapping[str, Any]) -> bool:
    """Whether every tensor-parallel rank gives this answer. All of them come here."""
    group = scheduler.tp_cpu_group
    import torch.distributed as dist

    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return True
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, comparable(told), group=group)
    return len(set(digests)) == 1


def comparable(told: Any) -> str:
    """Digest of an answer without what a rank measures for itself."""
    return sha256(json.dumps(_stripped(told), sort_keys=True).encode()).hexdigest()


def _stripped(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {key: _stripped(value) for key, value in part.items() if key not in _MEASURED}
    return [_stripped(each) for each in part] if isinstance(part, list) else part
