"""The agent that runs inside other people's processes. It is a separate package, which ours never imports.

`SITE` goes on the ``PYTHONPATH`` of a wrapped server. It holds ``aotgaudi_witness``, with the entry points by which vLLM and
SGLang find it in each of their processes. The agent uses the standard library only, runs on Python 3.9, and imports nothing
of aotgaudi. docs/formats/witness-events.md has the format of what it writes.
"""

from __future__ import annotations

from pathlib import Path

SITE = Path(__file__).parent / "site"
"""The folder for a server's ``PYTHONPATH``. It holds the agent and nothing else."""

ENTRY_POINT = "aotgaudi_witness"
"""The agent's name among the plugins that a server may load (``VLLM_PLUGINS``)."""
