"""The sides of a comparison, and the servers behind them.

``stock``: SGLang without the plug-in. ``off``: a KVShare server of which every request asks for
stock behaviour. ``reuse``: the same server, every request as it comes. Any other side is a method
of ``kvshare eval quality``, such as ``dhd@0.15``: the same server, every request with its settings.
Both servers run at the same time with the same flags; load goes to one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from kvshare_eval.errors import EvalError
from kvshare_eval.metering import scheduler_processes
from kvshare_eval.quality.methods import parse_methods
from kvshare_eval.servers import Mode, Server, ServerError

#: Side -> the kind of server, and what every request says under ``custom_params.kvshare``.
SIDES: dict[str, tuple[Mode, dict[str, Any] | None]] = {
    "stock": ("stock", None),
    "off": ("kvshare", {"reuse": "exact_prefix"}),
    "reuse": ("kvshare", None),
}
_CONTROL_SECONDS = 120.0


def side_of(name: str) -> tuple[Mode, dict[str, Any] | None]:
    """The kind of server, and what every request says.

    Raises:
        EvalError: no such side.
    """
    if name in SIDES:
        return SIDES[name]
    if "@" not in name:
        raise EvalError(
            f"unknown side {name!r}: allowed are {', '.join(SIDES)}, and SELECTOR@RATIO"
        )
    settings = dict(parse_methods([name])[-1].settings)
    # What a request computes serves the next ones, as it would without settings.
    del settings["publish"]
    return "kvshare", settings


@dataclass(frozen=True)
class Side:
    """One side while its server runs.

    Attributes:
        name: ``stock``, ``off`` or ``reuse``.
        url: of the server.
        kvshare: settings that every request carries.
        schedulers: the server's scheduler processes; empty for a server that was given by URL.
    """

    name: str
    url: str
    kvshare: Mapping[str, Any] | None
    schedulers: Sequence[psutil.Process] = field(default=(), compare=False)

    def flush(self) -> None:
        """Empty the server's cache."""
        _checked("POST", f"{self.url}/flush_cache?timeout=30")

    def server_facts(self) -> dict[str, Any]:
        """What the server says of itself that decides speed; nothing that names its machine."""
        info = json.loads(_checked("GET", f"{self.url}/server_info"))
        return {name: info[name] for name in _FACTS if name in info}

    def probe(self, prompt: Sequence[int]) -> None:
        """Ask for one token.

        Raises:
            EvalError: the answer shows another kind of server than the side needs.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        }
        if self.kvshare is not None:
            body["sampling_params"]["custom_params"] = {"kvshare": dict(self.kvshare)}
        answer = json.loads(_checked("POST", f"{self.url}/generate", body))
        details = answer["meta_info"].get("cached_tokens_details") or {}
        found, wanted = "kvshare" in details, side_of(self.name)[0] == "kvshare"
        if found and not wanted:
            raise EvalError(f"side {self.name}: its server runs KVShare; allowed are off, reuse")
        if wanted and not found:
            raise EvalError(f"side {self.name}: its server does not run KVShare; allowed is stock")


#: Fields of ``/server_info`` that are kept.
_FACTS = (
    "version",
    "attention_backend",
    "chunked_prefill_size",
    "device",
    "disable_overlap_schedule",
    "dtype",
    "kv_cache_dtype",
    "max_running_requests",
    "max_total_num_tokens",
    "mem_fraction_static",
    "page_size",
    "schedule_policy",
    "tp_size",
)


class MeteredServer(Server):
    """A server whose scheduler processes can be found."""

    def schedulers(self) -> list[psutil.Process]:
        assert self._process is not None, "the server runs"
        return scheduler_processes(self._process.pid)  # the leader of its own process group


def check_sides(names: Sequence[str]) -> tuple[str, ...]:
    """The sides in this order.

    Raises:
        EvalError: one of them is unknown or named twice.
    """
    for name in names:
        side_of(name)
    if not names or len(set(names)) < len(names):
        raise EvalError(f"sides {','.join(names)!r}: name each of them once")
    return tuple(names)


def read_urls(items: Sequence[str]) -> dict[str, str]:
    """Read ``side=http://...`` items."""
    urls: dict[str, str] = {}
    for item in items:
        name, equals, url = item.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            raise EvalError(f"--url {item}: write SIDE=http://HOST:PORT")
        if name in urls:
            raise EvalError(f"--url {name}=: given twice")
        urls[name] = url.rstrip("/")
    return urls


@contextmanager
def started_sides(
    names: Sequence[str], model: str, flags: Sequence[str], logs: Path
) -> Iterator[dict[str, Side]]:
    """Start the servers that these sides need, and stop them.

    Raises:
        EvalError: a server did not start; the message holds the end of its log.
    """
    with ExitStack() as running:
        servers: dict[Mode, MeteredServer] = {}
        for name in names:
            mode = side_of(name)[0]
            if mode not in servers:
                server = MeteredServer(model, mode=mode, log=logs / f"{mode}.log", args=flags)
                try:
                    servers[mode] = running.enter_context(server)
                except ServerError as error:
                    raise EvalError(f"the {mode} server: {error}") from error
        yield {
            name: Side(name, servers[mode].url, kvshare, servers[mode].schedulers())
            for name in names
            for mode, kvshare in [side_of(name)]
        }


def url_sides(urls: Mapping[str, str]) -> dict[str, Side]:
    """Sides on servers that run already."""
    return {name: Side(name, url, side_of(name)[1]) for name, url in urls.items()}


def _checked(method: str, url: str, body: Any = None) -> bytes:
    try:
        response = requests.request(method, url, json=body, timeout=_CONTROL_SECONDS)
    except requests.RequestException as error:
        raise EvalError(f"{url}: no answer: {error}") from None
    if response.status_code != 200:
        raise EvalError(f"{url} answered {response.status_code}: {response.text.strip()[:500]}")
    return response.content
