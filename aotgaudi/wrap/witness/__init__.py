"""The agent that runs inside other people's processes. It is a separate package, which ours never imports.

An archive of `SITE` goes on the ``PYTHONPATH`` of a wrapped server. It holds ``aotgaudi_witness``, with the entry points
by which vLLM and SGLang find it in each of their processes. The agent uses the standard library only, runs on Python 3.9,
and imports nothing of aotgaudi. docs/formats/witness-events.md has the format of what it writes.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from aotgaudi.digest import Digest

SITE = Path(__file__).parent / "site"
"""The agent's folder, which holds nothing else."""

ENTRY_POINT = "aotgaudi_witness"
"""The agent's name among the plugins that a server may load (``VLLM_PLUGINS``)."""


def write_agent(path: Path) -> Digest:
    """Writes the agent as an archive that Python can import from; returns its digest. Raises OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted(SITE.rglob("*")):
            if source.is_file() and source.suffix != ".pyc":
                name = zipfile.ZipInfo(str(source.relative_to(SITE)))
                archive.writestr(name, source.read_bytes())
    return Digest.of(path.read_bytes())
