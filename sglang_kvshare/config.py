"""The one frozen configuration and its one merge point.

Order of precedence: command line > environment (``KVSHARE_*``) > YAML file > default.
An unknown key is an error that names the nearest known one, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ENV_PREFIX = "KVSHARE_"
#: Environment names with the prefix that are no configuration keys. Two are not for users:
#: a launcher hands ``KVSHARE_RESOLVED`` and ``KVSHARE_VERDICT`` to its children.
ENV_SWITCH = "KVSHARE"
ENV_FILE = "KVSHARE_CONFIG"
#: The secret of the tenants' salts: never a key, so that it stands in no log and no listing.
ENV_TENANT_SECRET = "KVSHARE_TENANT_SECRET"
ENV_RESOLVED = "KVSHARE_RESOLVED"
ENV_VERDICT = "KVSHARE_VERDICT"
#: What `kvshare publish` sends; a server may be started from the same environment.
ENV_OPERATOR_KEY = "KVSHARE_OPERATOR_KEY"
_NO_KEYS = (ENV_FILE, ENV_TENANT_SECRET, ENV_RESOLVED, ENV_VERDICT, ENV_OPERATOR_KEY)

REUSE_MODES = ("off", "exact_prefix", "approximate")
ATTENTION_SOURCES = ("probe_pass", "check_layer")


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message names the field."""


def _selectors() -> tuple[str, ...]:
    # They need numpy, and the command starts without.
    from sglang_kvshare.recompute.selectors import selector_names

    return selector_names()


def _option(default: Any, doc: str, **rules: Any) -> Any:
    """A dataclass field with its documentation and its bounds: ``low`` and ``high``, ``choices``
    (:func:`choices_of`), ``numbers`` for a list of layers, or ``path`` for a file."""
    return field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True)
class KVShareConfig:
    """Settings of one server; every field is a CLI flag, an environment variable and a YAML key.

    Raises:
        ConfigError: a value of the wrong type or out of its bounds.
    """

    reuse: str = _option(
        "approximate",
        "What a request that does not say gets: nothing from the cache, stock SGLang's exact "
        "prefix, or cached passages at any position as well.",
        choices=REUSE_MODES,
    )
    selector: str = _option(
        "contribution",
        "Which reused tokens are recomputed all the same (see docs/selectors.md).",
        choices=_selectors,
    )
    recompute_ratio: float = _option(
        0.15,
        "Share of the reused tokens that is recomputed, seams and tail included. 0 recomputes "
        "none of them, not even the seams; 1 recomputes all.",
        low=0.0,
        high=1.0,
    )
    recompute_error: float = _option(
        1.0,
        "Below 1 it takes the place of recompute_ratio: as few tokens are recomputed as leave at "
        "most this share of the selector's score. Easy prompts then cost less, hard ones more.",
        low=0.0,
        high=1.0,
    )
    attention: str = _option(
        "probe_pass",
        "Where a selector that weighs by attention gets it from: the prompt's last rows over "
        "many layers, in a pass of their own, or all rows that are not reused, at the check layer.",
        choices=ATTENTION_SOURCES,
    )
    check_layers: str = _option(
        "1",
        "Layers at which deviation is measured, as ascending numbers separated by commas. All rows "
        "run up to the first; from there on the kept rows become fewer at each.",
        numbers=True,
    )
    max_deviation: float = _option(
        math.inf,
        "A span whose measured deviation (of its values at the first check layer, as a share of "
        "their size) is above this is computed in full. inf: none is.",
        low=0.0,
        high=math.inf,
    )
    probe_tokens: int = _option(
        32,
        "Rows before the output whose attention is looked at, by a selector that weighs by it.",
        low=1,
        high=4096,
    )
    seam_tokens: int = _option(
        8,
        "Tokens at the start of a span, and of those that continue it behind a short edit, that "
        "are recomputed when recompute_ratio is above 0.",
        low=0,
        high=4096,
    )
    tail_tokens: int = _option(
        8,
        "Tokens at the end of the prompt that are recomputed when recompute_ratio is above 0. "
        "The very last one always is.",
        low=0,
        high=4096,
    )
    min_run_tokens: int = _option(
        16,
        "Shortest run of equal tokens that is reused; windows of half of it are hashed.",
        low=4,
        high=1024,
    )
    min_saved_tokens: int = _option(
        32,
        "A plan that spares fewer rows than this is dropped: short prompts gain nothing.",
        low=1,
        high=1_000_000,
    )
    gate: str = _option(
        "measured",
        "Which plans are carried out: those that measured times predict to save time, or all "
        "that spare min_saved_tokens.",
        choices=("measured", "off"),
    )
    refresh_tokens: int = _option(
        0,
        "Reused prompt tokens of a request that a decode step recomputes, the most important "
        "first. 0: none.",
        low=0,
        high=64,
    )
    refresh_slowdown: float = _option(
        0.05,
        "Share of the decode time that refreshing may add, by measured times.",
        low=0.0,
        high=1e9,
    )
    similar_donors: bool = _option(
        True,
        "Whether what no run covers is looked for in similar prompts' windows too.",
    )
    embedder: str = _option(
        "",
        "Sentence model, a folder or a name that sentence-transformers loads, that sketches the "
        "windows instead of the served model's own input embeddings: a second model in the "
        "scheduler process, and slow (see docs/configuration.md).",
        path=True,
    )
    min_semantic_run_tokens: int = _option(
        4,
        "Shortest run of equal tokens that is reused beside a longer run of the same donor, or "
        "inside similar windows.",
        low=2,
        high=1024,
    )
    min_similarity: float = _option(
        0.0,
        "Cosine of two windows' sketches from which on their tokens are compared. 0: what suits "
        "the sketches, 0.6, or 0.7 with an embedder.",
        low=0.0,
        high=1.0,
    )
    min_window_coverage: float = _option(
        0.5,
        "Share that such runs must cover together, of a window or of the way from the longer run, "
        "or none of them counts.",
        low=0.0,
        high=1.0,
    )
    sketch_tokens: int = _option(
        64,
        "Tokens of a window that is sketched; windows overlap by half.",
        low=8,
        high=1024,
    )
    sketch_dims: int = _option(
        128,
        "Dimensions of a sketch: 4 bytes each for every half window of cached tokens.",
        low=8,
        high=4096,
    )
    similar_donors_per_window: int = _option(
        2,
        "Similar windows that a prompt's window is compared with, the most similar first.",
        low=1,
        high=64,
    )
    max_donors_per_window: int = _option(
        8,
        "How many cached places of one window are looked at, the most recent first.",
        low=1,
        high=64,
    )
    reuse_edges_per_node: int = _option(
        16,
        "Reuse edges kept behind one node of the radix tree: what served there is asked first "
        "when a prompt comes there again. 0: none.",
        low=0,
        high=1024,
    )
    donor_weight: float = _option(
        1.0,
        "How much longer nodes stay that served as donors: of u uses they are evicted after all "
        "nodes of a lower floor(donor_weight * log2(1 + u)). 0: SGLang's order, for servers that "
        "mostly chat: donors take room from prefixes.",
        low=0.0,
        high=64.0,
    )
    max_depth: int = _option(
        1,
        "Approximations that may rest on each other in a donor. 0: only exactly computed values "
        "serve as donors; 1: also what was computed on reused exact values; and so on.",
        low=0,
        high=8,
    )
    narrow_layer: int = _option(
        0,
        "First layer that runs for the selected and the new rows only; the layers before it "
        "run for every row and keep their fresh keys and values.",
        low=0,
        high=1024,
    )
    schedule: str = _option(
        "hit-rate",
        "Which waiting request goes first: the one with the largest reusable share, the one whose "
        "prefill is predicted to take the least, the one that came first, or what SGLang's "
        "--schedule-policy says.",
        choices=("hit-rate", "effective-cost", "fcfs", "stock"),
    )
    most_bypasses: int = _option(
        256,
        "No request is overtaken by so many younger ones, whatever they reuse.",
        low=1,
        high=4096,
    )
    hold_ms: float = _option(
        1000.0,
        "A request that waits for a passage which another one is computing right now is held back "
        "for so long at most. 0: none is.",
        low=0.0,
        high=60_000.0,
    )
    reserve: str = _option(
        "estimate",
        "What KV is kept for answers that are still to come: what their estimated lengths need, or "
        "what SGLang's decaying share of max_new_tokens says.",
        choices=("estimate", "stock"),
    )
    lookahead_steps: int = _option(
        2,
        "Decode steps before KV runs short at which that is acted upon.",
        low=1,
        high=64,
    )
    length_confidence: float = _option(
        0.7,
        "Share of the answers that are to end within what is reserved for them, at no load.",
        low=0.5,
        high=0.999,
    )
    length_confidence_slope: float = _option(
        0.001,
        "How that falls with the arrival rate: length_confidence / (1 + slope * arrivals_per_s).",
        low=0.0,
        high=1.0,
    )
    length_file: str = _option(
        "",
        "File in which what is known of answers' lengths outlives a restart. Empty: none.",
        path=True,
    )
    victims: str = _option(
        "slo",
        "Which running request gives way when KV runs short: the one with the loosest TBT SLO, the "
        "longest rest and the cheapest preemption, or SGLang's choice.",
        choices=("slo", "stock"),
    )
    most_preemptions: int = _option(
        3,
        "A request that gave way so often is protected as long as another one can.",
        low=1,
        high=100,
    )
    ttft_slo_ms: float = _option(
        math.inf,
        "Time to the first token that a request is to meet which does not say.",
        low=0.001,
        high=math.inf,
    )
    tbt_slo_ms: float = _option(
        math.inf,
        "Mean time between tokens that a request is to meet which does not say; prefills are cut "
        "so that the tightest of a batch holds.",
        low=0.001,
        high=math.inf,
    )
    preempt: str = _option(
        "auto",
        "What becomes of a preempted request's keys and values: copied to host memory and back "
        "(swap), computed again (recompute), whichever is predicted to be faster (auto), or as "
        "SGLang does (stock, which computes again).",
        choices=("auto", "swap", "recompute", "stock"),
    )
    host_pool_mb: int = _option(
        1024,
        "Megabytes (2**20 bytes) of host memory, for each scheduler process, that preempted "
        "requests are copied to; allocated when needed. 0: none are.",
        low=0,
        high=1 << 24,
    )
    tenants: str = _option(
        "",
        "YAML file that says who may share with whom (see docs/tenants.md). Empty: clients part "
        "the cache themselves, by cache_salt.",
        path=True,
    )
    optional: bool = _option(
        False,
        "Serve stock SGLang where KVShare cannot serve, with a warning that gives the reason, "
        "instead of ending the start (see docs/support.md).",
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check(spec, getattr(self, spec.name))
        if self.tenants and self.optional:
            raise ConfigError(
                "tenants and optional do not go together: stock SGLang, which would serve where "
                "KVShare cannot, does not keep tenants apart"
            )

    def to_json(self) -> str:
        """One line that :func:`from_json` reads back in a child process."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def option_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields of the configuration in order, each with ``metadata['doc']``."""
    return dataclasses.fields(KVShareConfig)


def choices_of(spec: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The values that a field allows; empty when it is not a choice."""
    choices = spec.metadata.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def layer_numbers(text: str) -> tuple[int, ...]:
    """``"1,4"`` -> ``(1, 4)``.

    Raises:
        ValueError: not ascending whole numbers from 1 on; the message says what is allowed.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    # At layer 0 a value depends on its token alone: a deviation there is rounding noise.
    if not layers or layers[0] < 1 or any(a >= b for a, b in pairwise(layers)):
        raise ValueError("allowed are ascending layer numbers from 1 on, such as 1 or 1,4")
    return layers


def cli_flag(name: str) -> str:
    """``recompute_ratio`` -> ``--kvshare-recompute-ratio``."""
    return "--kvshare-" + name.replace("_", "-")


def from_json(text: str) -> KVShareConfig:
    """Read what :meth:`KVShareConfig.to_json` wrote."""
    return KVShareConfig(**json.loads(text))


def resolve(
    *,
    cli: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    yaml_path: str | Path | None = None,
) -> KVShareConfig:
    """Merge all sources into one configuration.

    Args:
        cli: values by field name; ``None`` means not given on the command line.
        env: the process environment; only ``KVSHARE_*`` is read.
        yaml_path: a YAML mapping of field names to values; falls back to ``KVSHARE_CONFIG``.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of bounds.
    """
    env = env or {}
    merged: dict[str, Any] = {}
    path = yaml_path or env.get(ENV_FILE)
    if path:
        merged.update(_from_yaml(Path(path)))
    merged.update(_from_env(env))
    merged.update({key: value for key, value in (cli or {}).items() if value is not None})
    known = {spec.name for spec in option_fields()}
    for key in merged:
        if key not in known:
            raise ConfigError(_unknown(key, known, "KVShare configuration"))
    return KVShareConfig(**merged)


def switched_on(env: Mapping[str, str]) -> bool:
    """Whether ``KVSHARE`` asks for KVShare (``1``, ``true``, ``yes``, ``on``).

    Raises:
        ConfigError: any other non-empty value that is not a plain no.
    """
    value = env.get(ENV_SWITCH, "")
    if not value.strip():
        return False
    try:
        return _yes_or_no(value)
    except ValueError as error:
        raise ConfigError(
            f"{ENV_SWITCH}={value!r}: use 1 to switch KVShare on or 0 to leave it off"
        ) from error


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read KVShare configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of settings, not a {type(content).__name__}")
    return {str(key): _as_text(str(key), value) for key, value in content.items()}


def _as_text(key: str, value: Any) -> Any:
    """A list of layers may be a number or a list in YAML: ``1``, ``[1, 4]``."""
    numbers = {spec.name for spec in option_fields() if spec.metadata.get("numbers")}
    if key not in numbers or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) else value


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    specs = {spec.name: spec for spec in option_fields()}
    found: dict[str, Any] = {}
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in _NO_KEYS:
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        if key not in specs:
            known = {ENV_PREFIX + known_name.upper() for known_name in specs} | {ENV_FILE}
            raise ConfigError(_unknown(name, known, "environment variable"))
        found[key] = _parse(specs[key], text)
    return found


def _parse(spec: dataclasses.Field[Any], text: str) -> Any:
    kind: Callable[[str], Any] = type(spec.default)
    try:
        return _yes_or_no(text) if kind is bool else kind(text)
    except ValueError as error:
        raise ConfigError(
            f"{ENV_PREFIX}{spec.name.upper()}={text!r} is not {_named(type(spec.default))}"
        ) from error


def _yes_or_no(text: str) -> bool:
    """
    Raises:
        ValueError: neither a plain yes nor a plain no.
    """
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _check(spec: dataclasses.Field[Any], value: Any) -> None:
    kind = type(spec.default)
    # An int is a fine float; a bool is a number to Python alone.
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{spec.name}={value!r} is not {_named(kind)}")
    if spec.metadata.get("numbers"):
        try:
            layer_numbers(value)
        except ValueError as error:
            raise ConfigError(f"{spec.name}={value!r}: {error}") from error
    choices = choices_of(spec)
    if choices and value not in choices:
        raise ConfigError(f"{spec.name}={value!r}: allowed are {', '.join(choices)}")
    low, high = spec.metadata.get("low"), spec.metadata.get("high")
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{spec.name}={value!r}: allowed are values from {low} to {high}")


def _named(kind: type) -> str:
    return {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "a yes or a no (true or false in YAML, 1 or 0 in the environment)",
    }[kind]


def _unknown(key: str, known: set[str], what: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} key {key!r}{hint}"
