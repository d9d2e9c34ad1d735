"""What runs inside other people's processes: a package of its own, which this one never imports.

`SITE` goes on the ``PYTHONPATH`` of a guest. There lies ``aotgaudi_witness``, with the entry points by which vLLM and
SGLang find it in each of their processes. It uses the standard library only, runs on Python 3.9, and imports nothing of
aotgaudi. What it writes: docs/formats/witness-events.md.
"""

from __future__ import annotations

from pathlib import Path

SITE = Path(__file__).parent / "site"
"""The folder for a guest's ``PYTHONPATH``. Nothing else is in it."""

ENTRY_POINT = "aotgaudi_witness"
"""What the witness is called where a guest lists the plugins that it may load (``VLLM_PLUGINS``)."""
