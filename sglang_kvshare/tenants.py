"""Who may share with whom: from an API key or a header to the salt that the server assigns.

    tenants.yaml                            salt = HMAC-SHA256(server secret, domain, client's salt)
    alice  private                          domain ("private", "alice")     nobody else's
    bob    group:research                   domain ("group", "research")    bob's and carol's
    carol  group:research
    dave   public                           domain ("public",)              every public tenant's

What a client sends as ``cache_salt`` parts its domain further and never leads out of it. A salt
cannot be guessed without the secret, and does not show whose it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sglang_kvshare.config import ENV_TENANT_SECRET

#: Environment variable that holds the server's secret.
ENV_SECRET = ENV_TENANT_SECRET
_LEAST_SECRET_BYTES = 32
#: Hex digits of a salt that tell domains apart; as many more prove that the server assigned it.
_HALF = 32
_KEY = re.compile(r"sha256:[0-9a-f]{64}")
_GROUP = re.compile(r"group:[A-Za-z0-9][A-Za-z0-9_.-]*")


#: Whose the passages are that the operator published; no tenant may have this name.
PUBLISHED = "published"


class TenantError(ValueError):
    """A tenant file or a secret that cannot be used; the message names the field."""


class UnknownTenant(PermissionError):
    """A request that no tenant's key or header value fits."""


class Tenant(BaseModel):
    """One tenant.

    Attributes:
        api_keys: ``sha256:`` and the hex digest of each key that the tenant's clients send as a
            bearer token; the file then holds no secret.
        header_values: values of the file's ``header`` that name this tenant. A proxy has to set
            the header, and to strip what clients send.
        sharing: ``private``, ``group:NAME`` or ``public``.
        max_indexed_tokens: cached tokens that may serve as donors; beyond that the oldest leave.
        ttl_s: seconds after which what was cached serves nobody any more, not even as a prefix.
        ttft_slo_ms, tbt_slo_ms: what requests are to meet that do not say; see docs/scheduling.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = ()
    header_values: tuple[str, ...] = ()
    sharing: str = "private"
    max_indexed_tokens: int | None = Field(default=None, ge=1)
    ttl_s: float | None = Field(default=None, gt=0)
    ttft_slo_ms: float | None = Field(default=None, gt=0)
    tbt_slo_ms: float | None = Field(default=None, gt=0)

    @field_validator("sharing")
    @classmethod
    def _is_a_class(cls, sharing: str) -> str:
        if sharing not in ("private", "public") and not _GROUP.fullmatch(sharing):
            raise ValueError("allowed are private, public and group:NAME")
        return sharing

    @field_validator("api_keys")
    @classmethod
    def _are_digests(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return _digests(keys)


class TenantFile(BaseModel):
    """What a tenant file says.

    Attributes:
        operator_keys: digests, as a tenant's ``api_keys``, of the keys with which passages are
            published for all tenants.
        header: name of the HTTP header that names a tenant; ``None`` when keys alone do.
        unknown: what a request gets that fits no tenant: HTTP 403, or a domain that all such
            requests have together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator_keys: tuple[str, ...] = ()
    header: str | None = None
    unknown: Literal["refuse", "shared"] = "refuse"
    tenants: Mapping[str, Tenant]

    @field_validator("tenants")
    @classmethod
    def _are_not_the_operator(cls, tenants: Mapping[str, Tenant]) -> Mapping[str, Tenant]:
        if PUBLISHED in tenants:
            raise ValueError(f"{PUBLISHED} is what the operator's passages are called")
        return tenants

    @field_validator("operator_keys")
    @classmethod
    def _are_digests(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return _digests(keys)


class TenantBook:
    """Tells tenants apart and gives each its salt.

    Args:
        file: the tenants.
        secret: known to the server alone, at least 32 bytes.

    Raises:
        TenantError: a secret that is too short, or a key or header value of two tenants.
    """

    def __init__(self, file: TenantFile, secret: bytes) -> None:
        if len(secret) < _LEAST_SECRET_BYTES:
            raise TenantError(
                f"{ENV_SECRET} has {len(secret)} bytes: at least {_LEAST_SECRET_BYTES} are needed, "
                "such as those of `openssl rand -hex 32`"
            )
        self.file = file
        self._secret = secret
        self._by_key = _unique(file, "api_keys")
        self._by_header = _unique(file, "header_values")
        if shared := set(file.operator_keys) & self._by_key.keys():
            raise TenantError(
                f"operator_keys: {min(shared)} is the key of {self._by_key[min(shared)]} too: "
                "what a tenant sends must not be taken for the operator's"
            )
        if self._by_header and file.header is None:
            raise TenantError("header_values without `header`: name the header that carries them")

    @classmethod
    def read(cls, path: Path, environment: Mapping[str, str]) -> TenantBook:
        """Read a tenant file, and the secret from the environment.

        Raises:
            TenantError: a file that cannot be read, a field that is unknown or wrong, no secret.
        """
        try:
            content = yaml.safe_load(path.read_text())
            file = TenantFile.model_validate(content)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            # YAML's errors are several lines.
            raise TenantError(f"tenants file {path}: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            told = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}"
                for one in error.errors()
            )
            raise TenantError(f"tenants file {path}: {told}") from error
        return cls(file, environment.get(ENV_SECRET, "").encode())

    def tenant_of(self, api_key: str | None, header: str | None) -> str | None:
        """The tenant that a request is of; ``None`` for an unknown one that is served.

        Args:
            api_key: the bearer token, if there is one.
            header: the value of ``file.header``, if there is one.

        Raises:
            UnknownTenant: it fits none, or the two name different ones.
        """
        named = set()
        if api_key is not None:
            named.add(self._by_key.get(key_digest(api_key)))
        if header is not None and self.file.header is not None:
            named.add(self._by_header.get(header))
        known = named - {None}
        if len(known) > 1:
            raise UnknownTenant("the API key and the header name different tenants")
        if known:
            return known.pop()
        if self.file.unknown == "refuse":
            raise UnknownTenant("no tenant has this API key or header value")
        return None

    def salt(self, tenant: str | None, client_salt: str | None = None) -> str:
        """The ``cache_salt`` of a tenant's request: 64 hex digits.

        What was assigned to this tenant stays as it is: SGLang makes requests of requests (a turn
        after a tool's answer), and asks for each.

        Args:
            client_salt: what the client sent as ``cache_salt``.
        """
        domain = self._domain(tenant)
        if client_salt is not None and hmac.compare_digest(
            self._sealed(domain, client_salt[:_HALF]).encode(),
            client_salt.encode("utf-8", "surrogatepass"),
        ):
            return client_salt
        parts = () if client_salt is None else (client_salt,)
        return self._sealed(domain, self._digest(*domain, *parts)[:_HALF])

    @property
    def keys(self) -> frozenset[str]:
        """Digests of all keys, the operator's included."""
        return frozenset((*self._by_key, *self.file.operator_keys))

    def is_operator(self, api_key: str | None) -> bool:
        """Whether passages may be published with this bearer token."""
        return api_key is not None and key_digest(api_key) in self.file.operator_keys

    def may_share(self, tenant: str | None) -> str:
        """Equal for tenants that share, and for no others."""
        return self._digest(*self._domain(tenant))

    @property
    def public_salt(self) -> str:
        """Of the passages that the operator publishes; every tenant may reuse them, none may add
        to them."""
        return self._digest("published")

    def _sealed(self, domain: tuple[str, ...], half: str) -> str:
        return half + self._digest("assigned", *domain, half)[:_HALF]

    def _domain(self, tenant: str | None) -> tuple[str, ...]:
        if tenant is None:
            return ("unknown",)
        sharing = self.file.tenants[tenant].sharing
        if sharing == "private":
            return ("private", tenant)
        return ("public",) if sharing == "public" else ("group", sharing.partition(":")[2])

    def _digest(self, *parts: str) -> str:
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        message = "".join(f"{len(part)}:{part};" for part in parts)
        return hmac.new(
            self._secret, message.encode("utf-8", "surrogatepass"), "sha256"
        ).hexdigest()


def key_digest(api_key: str) -> str:
    """How a key stands in a tenant file."""
    return "sha256:" + hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()


def _digests(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_KEY.fullmatch(key) for key in keys):
        raise ValueError(
            "allowed is sha256: and 64 hex digits, as `printf %s KEY | sha256sum` prints them"
        )
    return keys


def _unique(file: TenantFile, field: str) -> dict[str, str]:
    told: dict[str, str] = {}
    for name, tenant in file.tenants.items():
        for value in getattr(tenant, field):
            if told.setdefault(value, name) != name:
                raise TenantError(f"{field}: {value!r} is of both {told[value]} and {name}")
    return told
