"""Where in a command line a vLLM server is started. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
"""What ``python -m`` starts a server by, as well as by ``vllm serve``."""

COMMAND_MODULE = "vllm.entrypoints.cli.main"
"""What the command ``vllm`` is as a module."""


def find_server(words: Sequence[str]) -> tuple[int, int] | None:
    """Returns where in `words` a vLLM server is started: the indices of the first word of that and of the first after it.

    None where none is.
    """
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else None
        is_serve = word.rpartition("/")[2] == "vllm" and after == "serve"
        is_module = word == "-m" and after in MODULES
        if is_serve or is_module:
            return index, index + 2
        if word == "-m" and after == COMMAND_MODULE and list(words[index + 2 : index + 3]) == ["serve"]:
            return index, index + 3
    return None
