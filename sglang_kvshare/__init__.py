"""KVShare for SGLang: reuse of cached KV that an exact prefix cannot serve."""

__version__ = "0.1.0"
