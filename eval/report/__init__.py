"""From runs to one page: ``kvshare eval report`` and ``kvshare eval compare``."""

from kvshare_eval.report.comparison import Comparison, compare
from kvshare_eval.report.page import write_report

__all__ = ["Comparison", "compare", "write_report"]
