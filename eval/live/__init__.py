"""A real SGLang scheduler inside this process, for what a server cannot be asked step by step."""
