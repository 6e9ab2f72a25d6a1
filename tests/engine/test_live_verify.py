"""`kvshare verify` on servers without a tokenizer: with KVShare, and stock."""

from __future__ import annotations

import pytest
from server_configs import on

from sglang_kvshare.verify.checks import verify
from sglang_kvshare.verify.client import VerifyError

pytestmark = pytest.mark.engine


@on("llama", "qwen3")
def test_it_proves_a_reuse_with_token_ids_alone(server):
    found = verify(server.url, passage_tokens=200)
    assert found.ok, found.checks
    assert found.prompts_made_of == "token ids"
    assert found.answers["default"].count("reused") > 100
    assert found.answers["stranger"].reason == "no_match"


@on("not_loaded")
def test_a_stock_server_is_named(server):
    with pytest.raises(VerifyError, match="runs SGLang without KVShare"):
        verify(server.url, passage_tokens=200)
