"""Runs a model: makes an engine, its tokenizer and its templates from a bundle and a model directory.

`LLM` is the Python API. `aotgaudi serve` uses the same parts. Importing this package does not import torch. Names are
imported on first use, so that the tokenizer and the template alone load fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
    from aotgaudi.llm.api import LLM, Output

__all__ = ["LLM", "Output", "SamplingParams", "StructuredOutputs"]

_HOMES = {
    "LLM": "aotgaudi.llm.api",
    "Output": "aotgaudi.llm.api",
    "SamplingParams": "aotgaudi.engine.sampling_params",
    "StructuredOutputs": "aotgaudi.engine.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
