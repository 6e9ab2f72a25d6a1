"""A command line as it may be shown to others: no path, no address, no key."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

#: Options whose values are never shown, and what stands in their place.
_HIDDEN = {
    "--api-key": "KEY",
    "--admin-api-key": "KEY",
    "--ssl-keyfile-password": "KEY",
    "--host": "HOST",
    "--dist-init-addr": "HOST",
    "--url": "URL",
}
#: An absolute path, or one from the home or the parent folder, anywhere in a word; the group is its
#: last part.
_PATH = re.compile(r"""(?<![\w./~-])(?:~\w*|\.{1,2})?(?:/[^\s/'",:;=]+)*/([^\s/'",:;=]+)/?""")
_ADDRESS = re.compile(r"""\w+://[^\s'"]+""")


def plain_command(words: Sequence[str]) -> str:
    """A command line that can be shown: paths cut to their last part, no addresses, no keys."""
    return " ".join(plain_words(words))


def plain_words(words: Sequence[str]) -> list[str]:
    """The words of :func:`plain_command`, one for one: a key may be the word behind its option."""
    shown = []
    option = ""
    for word in words:
        shown.append(_hidden(option, word) or _plain(word))
        option = word
    return shown


def _hidden(option: str, value: str) -> str | None:
    """What stands for the value of an option that is not shown; options may be abbreviated."""
    if not re.match("--[a-z]", option):
        return None
    matching = [name for name in _HIDDEN if name.startswith(option)]
    if not matching:
        return None
    shown = _HIDDEN[matching[0]]
    # One of several addresses, as NAME=URL.
    name, equals, _ = value.partition("=")
    return f"{name}={shown}" if shown == "URL" and equals and name.isalnum() else shown


def _plain(word: str) -> str:
    if _is_path(word):
        return Path(word).name
    if len(parts := _split(word)) > 1:
        # Flags of a server, given as one word.
        return shlex.quote(plain_command(parts))
    option, equals, value = word.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_hidden(option, value) or _plain(value)}"
    return _PATH.sub(r"\1", _ADDRESS.sub("URL", word))


def _is_path(word: str) -> bool:
    """A path as a whole, blanks and all; a hub name such as ``owner/model`` is none."""
    if os.sep not in word or " -" in word:
        return False
    return word.startswith((os.sep, "~")) or os.path.exists(word)


def _split(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()
