"""A model that runs: from a bundle and a model directory to an engine, its tokenizer and its templates.

`LLM` is the Python API; `aotgaudi serve` builds on the same parts. Importing this package imports no torch.
"""

import warnings

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.llm.api import LLM, Output

__all__ = ["LLM", "Output", "SamplingParams"]

# torch warns while it is imported where numpy is not installed; [serve] does without, and so do we.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
