"""How a model is spread over devices, and which part each device (a rank) holds.

The rules are vLLM's: ``vllm/config/model.py`` (``verify_with_parallel_config``, ``get_num_kv_heads``),
``vllm/model_executor/layers/linear.py`` (``QKVParallelLinear``) and ``vllm/distributed/utils.py``
(``get_pp_indices``).
"""

from __future__ import annotations

from pydantic import Field

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.model import ModelSpec

LARGEST_WORLD = 4096
"""More devices than any server has; a larger number is a mistake."""


class ParallelSpec(SpecValue):
    """`tensor_parallel_size` devices share each layer, `pipeline_parallel_size` groups of them share the layers.

    `expert_parallel`: the devices of a group hold whole experts instead of a part of each.
    """

    tensor_parallel_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    expert_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def kv_heads_of_rank(self, num_kv_heads: int) -> int:
        """Returns the key and value heads of each rank: a share, or one copied to several ranks."""
        return max(1, num_kv_heads // self.tensor_parallel_size)

    def share_of_rank(self, size: int) -> int:
        """Returns the part of a dimension that is split among the ranks of a layer, rounded up."""
        return -(-size // self.tensor_parallel_size)

    def layers_of_rank(self, num_layers: int) -> int:
        """Returns the number of layers of the rank that has most."""
        return -(-num_layers // self.pipeline_parallel_size)


def check_parallel(parallel: ParallelSpec, model: ModelSpec) -> None:
    """Raises SpecError if vLLM cannot spread the model like this; sizes that the config lacks are not checked."""
    size, where = parallel.tensor_parallel_size, "parallel.tensor_parallel_size"
    if size > 1 and model.states("num_attention_heads"):
        heads, kv_heads = model.num_attention_heads, model.num_kv_heads
        if heads % size:
            raise SpecError(where, f"is {size}", f"a divisor of the model's {heads} attention heads")
        if kv_heads % size and size % kv_heads:
            remedy = f"a divisor or a multiple of the model's {kv_heads} key and value heads"
            raise SpecError(where, f"is {size}", remedy)
    stages = parallel.pipeline_parallel_size
    if stages > 1 and model.states("num_hidden_layers") and stages > model.num_layers:
        where = "parallel.pipeline_parallel_size"
        raise SpecError(where, f"is {stages}", f"at most the model's {model.num_layers} layers")
