"""Which of a vllm-gaudi server's variables count: vLLM's, and all that the bridge and the graph compiler may read."""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.bucketing.bucket_file import FILE_VARIABLE
from aotgaudi.gaudi.environment import NEUTRAL, may_change_code, sealed_variables
from aotgaudi.wrap.adapters.shapes import FOLDER
from aotgaudi.wrap.adapters.variables import Hashed, VariableRules, is_secret
from aotgaudi.wrap.adapters.vllm import neutral

FILE = f"{FOLDER}/vllm.buckets"
"""Where the bucket file lies below a place's root."""

NAMES = frozenset(
    {
        *("num-gpu-blocks-override", "block-size", "max-model-len", "max-num-batched-tokens", "max-num-seqs"),
        *("enable-chunked-prefill", "enable-prefix-caching"),
        *("VLLM_CONTIGUOUS_PA", "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "PT_HPU_SDPA_BC_FACTOR"),
        "VLLM_FUSEDSDPA_SLIDE_THLD",
    }
)
"""Flags and variables that are added where they are not given."""

PREFIXES = ("VLLM_", "PT_", "HABANA_", "HCCL_", "HCL_", "GC_", "QUANT_", "INC_")


class GaudiVariables(VariableRules):
    """As those of vLLM, and besides: what names a file counts by its content, wherever that lies."""

    def is_looked_at(self, name: str) -> bool:
        """Returns whether a variable may be read by what compiles."""
        return super().is_looked_at(name) or may_change_code(name)

    def counted(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that count. Raises SpecError for one that names a file which cannot be read."""
        counted = super().counted(environ)
        sealed = sealed_variables({name: environ[name] for name in counted if not is_secret(name)})
        return {name: sealed.get(name, value) for name, value in counted.items()}


RULES = GaudiVariables(
    prefixes=PREFIXES,
    neutral={**neutral.VARIABLES, **NEUTRAL},
    hashed={
        **neutral.HASHED,
        FILE_VARIABLE: Hashed("where the bucket file lies; it is captured, and the shapes count"),
    },
)
