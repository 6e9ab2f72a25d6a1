"""Data sets in their original formats, from a folder or from the hub, or the small set at hand.

A file each for SQuAD, HotpotQA, GSM8K, QMSum, help-centre articles, BANKING77 and request traces;
``load_X(source)`` reads what :class:`DataSource` points at.
"""

from kvshare_eval.loaders.source import DataSource

__all__ = ["DataSource"]
