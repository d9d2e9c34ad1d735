"""A model that runs: from a bundle and a model directory to an engine, its tokenizer and its templates.

`LLM` is the Python API; `aotgaudi serve` builds on the same parts. Importing this package imports no torch.
"""

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.llm.api import LLM, Output

__all__ = ["LLM", "Output", "SamplingParams"]
