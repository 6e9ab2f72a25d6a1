"""Data sets in their original formats, from a folder or from the hub, or the small set at hand."""

from kvshare_eval.loaders.source import DataSource

__all__ = ["DataSource"]
