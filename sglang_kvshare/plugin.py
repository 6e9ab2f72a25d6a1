"""The two entry points that SGLang calls. They register and do nothing else.

Installed but not asked for, the package changes nothing: :func:`register` adds two flags to the
command line, and :func:`cpu_platform` stays out of the way.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs in every SGLang process."""
    from sglang_kvshare.engine.activation import register_plugin

    register_plugin()


def cpu_platform() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns:
        The dotted name of the platform class when this machine has no accelerator, no other
        platform serves it, and KVShare (or this platform by name) was asked for; else ``None``.
    """
    from sglang_kvshare.engine.platform_choice import choose_cpu_platform

    return choose_cpu_platform()
