"""Finds where a command starts vLLM, and the variables that it assigns, from the words alone. Imports almost nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
"""The modules with which ``python -m`` starts a vLLM server."""

_COMMAND_MODULE = "vllm.entrypoints.cli.main"
"""The module behind the command ``vllm``."""

REMEDY = f"vllm serve MODEL ..., or python -m {_MODULES[0]} --model MODEL ..."
"""Examples of a command that starts a server."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def find_vllm(words: Sequence[str]) -> tuple[int, int] | None:
    """Returns where `words` start a vLLM server: the indices of the first word that does, and of the first after it."""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else None
        is_serve = word.rpartition("/")[2] == "vllm" and after == "serve"
        is_module = word == "-m" and after in _MODULES
        if is_serve or is_module:
            return index, index + 2
        if word == "-m" and after == _COMMAND_MODULE and list(words[index + 2 : index + 3]) == ["serve"]:
            return index, index + 3
    return None


def has_one_api_server(words: Sequence[str]) -> bool:
    """Returns whether `words` start the module that has one API server, whatever its flags say.

    Source: ``main`` of vllm/entrypoints/launchers/api_server/entry.py. ``vllm serve`` starts several.
    """
    return any(word == "-m" and after in _MODULES for word, after in itertools.pairwise(words))


def assignments(head: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each word that assigns a variable."""
    for word in head:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            yield found[1], found[2]
