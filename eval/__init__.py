"""Evaluation of KVShare: prompts, measurements and their reports."""
