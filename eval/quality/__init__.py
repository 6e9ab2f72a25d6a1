"""What reuse costs in quality: ``kvshare eval quality``."""
