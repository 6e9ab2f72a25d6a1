"""Who shares with whom: all pairs of domains, crafted names and salts, and files that are wrong."""

from __future__ import annotations

import hashlib
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.tenants import (
    ENV_SECRET,
    TenantBook,
    TenantError,
    TenantFile,
    UnknownTenant,
)

pytestmark = pytest.mark.unit

SECRET = b"0123456789abcdef0123456789abcdef"


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


CONTENT = {
    "header": "X-Tenant",
    "tenants": {
        "alice": {"api_keys": [digest("key-a"), digest("key-a2")]},
        "bob": {"api_keys": [digest("key-b")], "sharing": "group:research"},
        "carol": {"header_values": ["carol"], "sharing": "group:research"},
        "dave": {"header_values": ["dave"], "sharing": "public"},
        "erin": {"header_values": ["erin"], "sharing": "public"},
        "research": {"header_values": ["r"]},
        "public": {"header_values": ["p"]},
    },
}


def book(secret=SECRET, **changes):
    return TenantBook(TenantFile.model_validate({**CONTENT, **changes}), secret)


def test_a_request_is_known_by_its_key_or_header():
    tenants = book()
    assert tenants.tenant_of("key-a", None) == "alice"
    assert tenants.tenant_of("key-a2", None) == "alice"
    assert tenants.tenant_of(None, "carol") == "carol"
    for key, header in ((None, None), ("key-x", None), (None, "alice"), ("", "")):
        with pytest.raises(UnknownTenant):
            tenants.tenant_of(key, header)
    with pytest.raises(UnknownTenant, match="different"):
        tenants.tenant_of("key-a", "carol")
    assert book(unknown="shared").tenant_of("key-x", None) is None


def test_only_a_group_and_the_public_share():
    tenants = book()
    together = {frozenset(("bob", "carol")), frozenset(("dave", "erin"))}
    names = [*CONTENT["tenants"], None]
    for one, other in combinations(names, 2):
        same = tenants.salt(one) == tenants.salt(other)
        assert same == (frozenset((one, other)) in together), (one, other)
    salts = {tenants.salt(name) for name in names}
    assert tenants.public_salt not in salts, "nobody adds to what is published"


names = st.text(st.characters(codec="utf-8"), min_size=0, max_size=6)


@given(st.lists(names.filter(bool), min_size=2, max_size=2, unique=True), names, names)
def test_no_salt_of_a_client_leads_out_of_its_domain(tenants, one, other):
    known = TenantBook(
        TenantFile.model_validate({"tenants": {name: {} for name in tenants}}), SECRET
    )
    first, second = tenants
    assert known.salt(first, one) != known.salt(second, other)
    assert known.salt(first, one) != known.salt(second)
    assert known.salt(first, one) != known.salt(first)
    assert (known.salt(first, one) == known.salt(first, other)) == (one == other)
    # Not even one that is a salt itself.
    assert known.salt(first, known.salt(second)) != known.salt(second)
    assert known.public_salt not in (known.salt(first, one), known.salt(first))


def test_a_salt_needs_the_secret():
    assert book().salt("alice") == book().salt("alice"), "the same after a restart"
    assert book(SECRET + b"x").salt("alice") != book().salt("alice")
    with pytest.raises(TenantError, match=f"{ENV_SECRET} has 5 bytes"):
        book(b"short")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tenants": {"a": {"sharing": "grup:x"}}}, "tenants.a.sharing.*private, public and group"),
        ({"tenants": {"a": {"sharing": "group:"}}}, "tenants.a.sharing"),
        ({"tenants": {"a": {"api_keys": ["plain"]}}}, "tenants.a.api_keys.*sha256sum"),
        ({"tenants": {"a": {"shares": "private"}}}, "tenants.a.shares"),
        ({"tenants": {"a": {"ttl_s": 0}}}, "tenants.a.ttl_s"),
        ({"tenants": {"a": {"max_indexed_tokens": -1}}}, "tenants.a.max_indexed_tokens"),
        ({"unknown": "let in"}, "unknown.*refuse"),
        ({"tennants": {}}, "tennants"),
        ({"operator_keys": ["plain"]}, "operator_keys.*sha256sum"),
        ({"operator_keys": [digest("key-a")]}, "operator_keys.*key of alice"),
        ({"tenants": []}, "tenants"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, named):
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **changes}))
    with pytest.raises(TenantError, match=named):
        TenantBook.read(path, {ENV_SECRET: SECRET.decode()})


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path):
    path = tmp_path / "tenants.yaml"
    for content in (b"tenants: [\n  a: b: c\n", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(TenantError, match=r"tenants\.yaml") as refused:
            TenantBook.read(path, {ENV_SECRET: SECRET.decode()})
        assert "\n" not in str(refused.value)


def test_the_example_is_good():
    path = Path(__file__).parents[2] / "configs" / "tenants.yaml"
    read = TenantBook.read(path, {ENV_SECRET: SECRET.decode()})
    assert read.tenant_of("example-key-1", None) == read.tenant_of("example-key-2", None) == "acme"
    assert read.is_operator("example-operator-key")
    assert not read.is_operator("example-key-1")
    assert read.salt("legal") == read.salt("finance") != read.salt("help-page")
    assert read.file.tenants["acme"].max_indexed_tokens == 200_000
    with pytest.raises(UnknownTenant):
        read.tenant_of(None, None)


@given(names, names)
def test_an_assigned_salt_stays_as_it_is_and_only_where_it_was_assigned(one, other):
    tenants = book()
    for client in (None, one):
        salt = tenants.salt("alice", client)
        assert tenants.salt("alice", salt) == salt
        assert tenants.salt("bob", salt) != salt
        assert tenants.salt("alice", salt[:32]) != salt
        assert tenants.salt("alice", salt[:32] + other) != salt or salt[:32] + other == salt


def test_who_may_share_has_one_name():
    tenants = book()
    assert tenants.may_share("bob") == tenants.may_share("carol") != tenants.may_share("alice")
    assert tenants.may_share(None) not in {tenants.may_share(name) for name in CONTENT["tenants"]}


def test_a_key_of_two_tenants_and_values_without_a_header_are_refused(tmp_path):
    twice = {"a": {"api_keys": [digest("k")]}, "b": {"api_keys": [digest("k")]}}
    with pytest.raises(TenantError, match="both a and b"):
        book(tenants=twice)
    with pytest.raises(TenantError, match="header"):
        book(header=None)
    with pytest.raises(TenantError, match="no-such-file"):
        TenantBook.read(tmp_path / "no-such-file", {})


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    read = TenantBook.read(path, {ENV_SECRET: SECRET.decode()})
    assert read.salt("alice") == book().salt("alice")
    with pytest.raises(TenantError, match=ENV_SECRET):
        TenantBook.read(path, {})
