"""From runs to one page: ``kvshare eval report`` and ``kvshare eval compare``."""
