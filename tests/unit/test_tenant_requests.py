"""Where a request gets its namespace: every shape of request, and every way to lie about it."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_kvshare.engine import tenancy
from sglang_kvshare.engine.tenant_requests import assign, check
from sglang_kvshare.request import RequestError
from sglang_kvshare.tenants import TenantBook, TenantError, TenantFile, UnknownTenant

pytestmark = pytest.mark.unit


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def book(**changes):
    content = {
        "header": "X-Tenant",
        "operator_keys": [digest("key-op")],
        "tenants": {
            "alice": {"api_keys": [digest("key-a")], "header_values": ["alice"]},
            "bob": {"header_values": ["bob"], "sharing": "group:g"},
            "carol": {"header_values": ["carol"], "sharing": "group:g"},
        },
    }
    return TenantBook(TenantFile.model_validate({**content, **changes}), b"s" * 32)


BOOK = book()


class Headers:
    """As Starlette's: the first value of a name counts."""

    def __init__(self, *pairs):
        self.pairs = [(name.lower(), value) for name, value in pairs]

    def getlist(self, name):
        return [value for known, value in self.pairs if known == name.lower()]

    def get(self, name):
        return next(iter(self.getlist(name)), None)


def request(*pairs, path="/generate", host="server"):
    """A client's request; ``url`` is what it makes of the server by its Host header."""
    return SimpleNamespace(
        headers=Headers(*pairs),
        scope={"type": "http", "path": path},
        url=SimpleNamespace(path=f"/{host}"),
    )


ALICE = request(("Authorization", "Bearer key-a"))
BOB, CAROL = request(("X-Tenant", "bob")), request(("x-tenant", "carol"))
OPERATOR = request(("Authorization", "Bearer key-op"))


@dataclass
class Generate:
    """The fields of SGLang's request that are looked at."""

    sampling_params: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    session_params: Any = None
    rid: Any = None


@dataclass
class Embed:
    sampling_params: Any = field(default=None)


def assigned(obj, who, *, starting=False, tenants=BOOK):
    obj = copy.deepcopy(obj)
    assign(tenants, obj, who, starting=starting)
    return obj


def tenants_in(obj):
    every = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    return [(params.get("custom_params") or {}).get("kvshare_tenant") for params in every]


FORGED = {"custom_params": {"kvshare_tenant": "bob", "kvshare": {"reuse": "off"}, "other": 1}}


@pytest.mark.parametrize(
    "given",
    [None, {}, {"temperature": 0}, {"custom_params": None}, FORGED, [{}, FORGED], [FORGED]],
    ids=str,
)
def test_every_shape_of_sampling_parameters_says_whose_it_is(given):
    obj = Generate(sampling_params=given)
    done = assigned(obj, ALICE)
    assert isinstance(done.sampling_params, list) == isinstance(given, list)
    assert tenants_in(done) == ["alice"] * len(given if isinstance(given, list) else [given])
    # What else was said stays.
    before = [given or {}] if not isinstance(given, list) else given
    after = done.sampling_params if isinstance(given, list) else [done.sampling_params]
    for one, other in zip(before, after, strict=True):
        kept = {**(one.get("custom_params") or {}), "kvshare_tenant": "alice"}
        assert other == {**one, "custom_params": kept}


def test_one_dictionary_for_a_batch_is_not_changed_under_the_client():
    shared = {"custom_params": {"kvshare": {}}}
    obj = Generate(sampling_params=[shared, shared])
    assign(BOOK, obj, ALICE, starting=False)
    assert shared == {"custom_params": {"kvshare": {}}}


@pytest.mark.parametrize("bad", ["text", 5, ["list"]], ids=str)
def test_custom_params_that_are_no_object_are_named(bad):
    with pytest.raises(RequestError, match="custom_params must be an object"):
        assigned(Generate(sampling_params={"custom_params": bad}), ALICE)


def test_what_sglang_refuses_is_left_for_it():
    done = assigned(Generate(sampling_params=["no object"], cache_salt={"a": 1}), ALICE)
    assert done.sampling_params == ["no object"]
    assert done.cache_salt == {"a": 1}
    assert assigned(Generate(cache_salt=["a", 5]), ALICE).cache_salt[1] == 5


def test_a_salt_stays_within_the_tenants_own_domain():
    own = assigned(Generate(), ALICE).cache_salt
    assert own == assigned(Generate(cache_salt=""), ALICE).cache_salt == BOOK.salt("alice")
    for crafted in ("x", own[:32], BOOK.public_salt, BOOK.salt("bob"), BOOK.salt(None)):
        salt = assigned(Generate(cache_salt=crafted), ALICE).cache_salt
        assert salt == BOOK.salt("alice", crafted)
        assert salt not in (own, crafted)
    # Sharing classes, with the controls beside them.
    assert assigned(Generate(cache_salt="x"), BOB) == assigned(Generate(cache_salt="x"), BOB), (
        "itself"
    )
    bob, carol = assigned(Generate(cache_salt="x"), BOB), assigned(Generate(cache_salt="x"), CAROL)
    assert bob.cache_salt == carol.cache_salt
    assert bob.cache_salt != assigned(Generate(cache_salt="x"), ALICE).cache_salt


def test_each_salt_of_a_batch_is_assigned():
    done = assigned(Generate(sampling_params=[{}, {}, {}], cache_salt=["a", "", "a"]), ALICE)
    assert done.cache_salt == [BOOK.salt("alice", s) for s in ("a", None, "a")]


def test_a_request_of_a_request_keeps_its_namespace():
    """SGLang makes the turn after a tool's answer from the first one's fields."""
    for salt in (None, "x", ["a", "b"]):
        once = assigned(Generate(cache_salt=salt), ALICE)
        assert assigned(once, ALICE) == once
    # Given to another tenant it is a text like any other.
    other = assigned(assigned(Generate(cache_salt="x"), ALICE), BOB)
    assert other.cache_salt == BOOK.salt("bob", BOOK.salt("alice", "x"))


def test_keys_that_part_a_domain_further_are_kept():
    done = assigned(Generate(extra_key="class", rid="HEALTH_CHECK_1"), ALICE)
    assert (done.extra_key, done.cache_salt) == ("class", BOOK.salt("alice"))


@pytest.mark.parametrize(
    "who",
    [
        None,
        request(),
        request(("Authorization", "Bearer wrong")),
        request(("Authorization", "key-a")),
        request(("Authorization", "Basic key-a")),
        request(("X-Tenant", "mallory")),
        request(("Authorization", "Bearer key-a"), ("X-Tenant", "bob")),
        # A proxy added the second; the client hopes for the first.
        request(("X-Tenant", "alice"), ("X-Tenant", "bob")),
        request(("Authorization", "Bearer key-a"), ("Authorization", "Bearer key-op")),
        # Where a URL is made of the client's Host, its path is the client's.
        request(host="health"),
        request(path="/health/../generate"),
        OPERATOR,
    ],
    ids=str,
)
def test_strangers_are_refused(who):
    for obj in (Generate(), Generate(rid="HEALTH_CHECK_1"), Embed()):
        with pytest.raises(UnknownTenant):
            assigned(obj, who)
    with pytest.raises(UnknownTenant):
        check(BOOK, who, None, starting=False)


def test_who_is_known_by_key_or_header():
    for who in (
        ALICE,
        request(("authorization", "bearer key-a")),
        request(("X-Api-Key", "key-a")),
        request(("X-Tenant", "alice")),
        request(("X-Tenant", "alice"), ("X-Tenant", "alice")),
        request(("Authorization", "Bearer the-servers"), ("X-Tenant", "alice")),
    ):
        assert assigned(Generate(), who).cache_salt == BOOK.salt("alice")
        check(BOOK, who, None, starting=False)
        assigned(Embed(), who)


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_checks_and_the_warm_up_are_served_apart(path):
    for served, starting in ((request(path=path), False), (request(), True)):
        done = assigned(Generate(sampling_params=FORGED), served, starting=starting)
        assert done.cache_salt == BOOK.salt(None)
        assert tenants_in(done) == [None]
        assert done.sampling_params["custom_params"]["other"] == 1
    # The server's own code, before there are clients: nothing is touched.
    own = Generate(sampling_params=FORGED, cache_salt="x")
    assert assigned(own, None, starting=True) == own


def test_unknown_ones_may_have_a_domain_together():
    tenants = book(unknown="shared")
    for who in (request(), request(("Authorization", "Bearer wrong")), None):
        done = assigned(Generate(sampling_params=FORGED), who, tenants=tenants)
        assert done.cache_salt == tenants.salt(None)
        assert tenants_in(done) == [None]


def test_sessions_are_refused():
    with pytest.raises(RequestError, match="session_params"):
        assigned(Generate(session_params={"id": "s"}), ALICE)


# --- published passages ---------------------------------------------------------------------------

PUBLISH = {"custom_params": {"kvshare": {"publish_as": "public"}}}


def test_the_operator_publishes_and_nobody_else():
    done = assigned(Generate(sampling_params={**PUBLISH, "max_new_tokens": 9, "n": 4}), OPERATOR)
    assert done.cache_salt == BOOK.public_salt
    assert done.sampling_params == {
        "max_new_tokens": 0,
        "temperature": 0.0,
        "custom_params": {"kvshare": {"reuse": "exact_prefix", "publish_as": "public"}},
    }
    assert assigned(done, OPERATOR) == done
    batch = assigned(Generate(sampling_params=[PUBLISH, PUBLISH]), OPERATOR)
    assert batch.sampling_params == [done.sampling_params] * 2
    for who in (ALICE, request(), request(("X-Api-Key", "wrong")), None):
        with pytest.raises(UnknownTenant, match="operator_keys"):
            assigned(Generate(sampling_params=PUBLISH), who)
        with pytest.raises(UnknownTenant, match="operator_keys"):
            check(BOOK, who, PUBLISH["custom_params"], starting=False)
    check(BOOK, OPERATOR, PUBLISH["custom_params"], starting=False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cache_salt": "x"}, "cache_salt"),
        ({"cache_salt": ["x"]}, "cache_salt"),
        ({"extra_key": "x"}, "extra_key"),
        ({"sampling_params": [PUBLISH, {}]}, "all prompts of a batch"),
        ({"session_params": {"id": "s"}}, "session_params"),
    ],
    ids=str,
)
def test_what_does_not_go_with_publishing_is_named(fields, named):
    with pytest.raises(RequestError, match=named):
        assigned(Generate(**{"sampling_params": PUBLISH, **fields}), OPERATOR)


# --- what does not go together --------------------------------------------------------------------

PLAIN = {
    "grpc_port": None,
    "smg_grpc_mode": False,
    "grpc_mode": False,
    "tokenizer_worker_num": 1,
    "schedule_policy": "fcfs",
    "enable_custom_logit_processor": False,
    "api_key": None,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"grpc_port": 5}, "gRPC"),
        ({"smg_grpc_mode": True}, "gRPC"),
        ({"tokenizer_worker_num": 2}, "tokenizer"),
        ({"schedule_policy": "lpm"}, "one tenant's hits would move"),
        ({"enable_custom_logit_processor": True}, "custom-logit-processor"),
        ({"api_key": "the-servers"}, "--api-key"),
    ],
    ids=str,
)
def test_arguments_that_would_let_a_client_by_are_refused(changes, named):
    tenancy.check_arguments(SimpleNamespace(**PLAIN), BOOK)
    with pytest.raises(TenantError, match=named):
        tenancy.check_arguments(SimpleNamespace(**{**PLAIN, **changes}), BOOK)


def test_the_servers_own_key_goes_with_tenants_by_header():
    by_header = book(operator_keys=[], tenants={"bob": {"header_values": ["bob"]}})
    tenancy.check_arguments(SimpleNamespace(**{**PLAIN, "api_key": "the-servers"}), by_header)
