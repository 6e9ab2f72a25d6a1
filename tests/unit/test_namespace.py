"""Trust domains: no two encode alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvshare.matching.namespace import Namespace

pytestmark = pytest.mark.unit
TEXTS = st.none() | st.text(alphabet="a1:;-é", max_size=6)
NAMESPACES = st.builds(Namespace, TEXTS, TEXTS, TEXTS)


@given(NAMESPACES, NAMESPACES)
def test_the_encoding_is_injective(one, other):
    assert (one.encode() == other.encode()) == (one == other)


@given(NAMESPACES, NAMESPACES)
def test_the_tree_key_keeps_caller_key_and_adapter_apart(one, other):
    same = (one.extra_key, one.adapter) == (other.extra_key, other.adapter)
    assert (one.tree_key() == other.tree_key()) == same


def test_the_common_case_has_no_key():
    assert Namespace().tree_key() is None
    assert Namespace(cache_salt="s").tree_key() is None
    assert (
        Namespace(extra_key="ab", adapter="c").tree_key()
        != Namespace(extra_key="a", adapter="bc").tree_key()
    )
