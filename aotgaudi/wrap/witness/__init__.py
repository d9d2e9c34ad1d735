"""The agent that runs inside other people's processes. It is a separate package, which our own code never imports.

An archive of `SITE` goes on the ``PYTHONPATH`` of a wrapped server. It holds ``aotgaudi_witness``, with the entry points by
which vLLM and SGLang find it in each of their processes. The agent uses the standard library only, runs on Python 3.9, and
imports nothing of aotgaudi. docs/formats/witness-events.md describes what it writes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from aotgaudi.digest import Digest

SITE = Path(__file__).parent / "site"
"""The agent's folder, which contains nothing else."""

ENTRY_POINT = "aotgaudi_witness"
"""The agent's name among the plugins that a server may load (``VLLM_PLUGINS``)."""


def write_agent(path: Path) -> Digest:
    """Writes the agent as an archive that Python can import from. Returns its digest. Raises OSError."""
    import zipfile  # Only here: a refusal need not wait for it.

    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted(SITE.rglob("*")):
            if source.is_file() and source.suffix != ".pyc":
                name = zipfile.ZipInfo(str(source.relative_to(SITE)))
                archive.writestr(name, source.read_bytes())
    return Digest.of(path.read_bytes())


@cache
def _commands() -> ModuleType:
    path = SITE / "aotgaudi_witness" / "commands.py"
    spec = importlib.util.spec_from_file_location("aotgaudi.wrap.witness.commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kind_of_command(words: Sequence[str]) -> str:
    """Returns the agent's classification of a command line: ``compiler``, ``probe`` or ``other``. We use the same code."""
    return str(_commands().kind_of_command(words))
