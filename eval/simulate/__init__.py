"""Experiments on a model in plain PyTorch, before anything is built into the server."""
