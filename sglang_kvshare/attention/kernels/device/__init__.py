"""The Triton side; importing it needs Triton, launching it a CUDA device or Triton's interpreter.

Each module has its kernels, ``constants`` (what a launch compiles in, from shapes alone, so that
they compile without a device as well) and ``run``, which the module of the same name above calls.
"""
