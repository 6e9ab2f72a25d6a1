"""Adapters to SGLang 0.5.23, one a seam. Nothing outside this folder imports SGLang."""
