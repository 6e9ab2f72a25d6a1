"""``kvshare verify URL``: see :mod:`sglang_kvshare.verify.checks`."""
