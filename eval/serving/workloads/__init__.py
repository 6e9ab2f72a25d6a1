"""Serving workloads, each a file of its own in this folder, found by name."""
