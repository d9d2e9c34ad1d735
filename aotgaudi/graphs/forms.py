"""What a dialect's graphs are: caches, inputs, attention, masks, samplers, exchanges. Tracing itself is the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.graphs.hpu import HpuForm
from aotgaudi.graphs.mixers.base import Mixer
from aotgaudi.graphs.mixers.families import mixer_of, require_packable
from aotgaudi.graphs.program import ANY_NUM_BLOCKS, CacheSpec, TensorSpec
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import Window, decode_inputs, prompt_inputs
from aotgaudi.graphs.swap import SwapGraph
from aotgaudi.spec.cache_rows import (
    Compression,
    compressions_of,
    family_of,
    require_block_size,
    rows_of,
)
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.sampler_signature import SamplerSignature

_TRACED_BLOCKS = 6
_ANY_BLOCKS = {1: torch.export.Dim("num_blocks", min=2)}
"""A server has the padding block and at least one more, so no graph is made for 0 or 1 blocks."""

Prologue = tuple[nn.Module, tuple[TensorSpec, ...]]
"""A module that makes inputs of a step's graph, and the inputs that it takes."""


class Form(Protocol):
    """The graphs of a dialect. `model` is what rows follow from (`aotgaudi.graphs.step.described_by`)."""

    pads_with_zeros: bool
    """Whether padding is embedded as zeros, because the device skips rows of zeros."""

    def require_built(self, config: Any, model: ModelSpec, *, has_packed_weights: bool) -> None:
        """Raises SpecError for a model, of a transformers config, or a mode in which the form was not shown to be right."""
        ...

    def caches(self, model: ModelSpec, limits: ServingLimits) -> tuple[CacheSpec, ...]:
        """Returns the caches of every layer, in order."""
        ...

    def cache_to_trace(self, spec: CacheSpec) -> tuple[Tensor, dict[int, Any] | None]:
        """Returns a cache to trace with, and its open dimension in torch.export's form, if it has one."""
        ...

    def step_inputs(
        self, entry: StepEntry, limits: ServingLimits, windows: Sequence[Window], model: ModelSpec
    ) -> tuple[TensorSpec, ...]:
        """Returns every input that the step's own graph may take. A program lists those that its graphs use."""
        ...

    def mixer(self, model: ModelSpec, limits: ServingLimits) -> Mixer:
        """Returns how the model's layers attend."""
        ...

    def made_by_prologue(self, used: Sequence[str]) -> tuple[str, ...]:
        """Returns which of the inputs that a step's graph uses are made on the device, in the prologue's order."""
        ...

    def prologue(
        self, entry: StepEntry, limits: ServingLimits, dtype: str, names: Sequence[str]
    ) -> Prologue | None:
        """Returns what makes the inputs `names`; None if there are none."""
        ...

    def finish(self, graph: fx.Graph) -> None:
        """Changes the graph of a piece so that the device compiles it whole."""
        ...

    def sampler(self, signature: SamplerSignature, num_logprobs: int) -> SamplerGraph:
        """Returns the sampler's graph."""
        ...

    def exchange(self, limits: ServingLimits) -> tuple[nn.Module, ...]:
        """Returns what exchanges blocks of a cache, in turn: each takes the cache, the last one's result, and the pairs."""
        ...


class AtenForm:
    """What inductor takes: one cache a layer, of any number of blocks, and masks made by the server."""

    pads_with_zeros = True

    def require_built(self, config: Any, model: ModelSpec, *, has_packed_weights: bool) -> None:
        """Raises SpecError for packed weights that the model's family does not have."""
        del config
        if has_packed_weights:
            require_packable(model)

    def caches(self, model: ModelSpec, limits: ServingLimits) -> tuple[CacheSpec, ...]:
        """Returns them as the model's rows say. Raises SpecError for blocks that would end inside a row."""
        kept, size = rows_of(model), limits.block_size
        require_block_size(kept, size)
        return tuple(
            CacheSpec(
                name=cache.name,
                shape=(
                    cache.planes,
                    ANY_NUM_BLOCKS,
                    cache.heads,
                    cache.rows_per_block(size),
                    cache.width,
                ),
                dtype=cache.dtype or model.dtype,
            )
            for cache in kept
        )

    def cache_to_trace(self, spec: CacheSpec) -> tuple[Tensor, dict[int, Any]]:
        """Returns a small cache, whose number of blocks the graph leaves open."""
        return torch.zeros(spec.sizes(_TRACED_BLOCKS), dtype=getattr(torch, spec.dtype)), _ANY_BLOCKS

    def step_inputs(
        self, entry: StepEntry, limits: ServingLimits, windows: Sequence[Window], model: ModelSpec
    ) -> tuple[TensorSpec, ...]:
        """Returns them as the server gives them."""
        compressions: Sequence[Compression] = ()
        if family_of(model) == "compressed":
            compressions = [compression for compression in compressions_of(model) if compression]
        if isinstance(entry, PromptEntry):
            return prompt_inputs(entry, limits.block_size, windows, compressions)
        return decode_inputs(entry, limits.block_size, windows, compressions)

    def mixer(self, model: ModelSpec, limits: ServingLimits) -> Mixer:
        """Returns the mixer of the model's family."""
        del limits
        return mixer_of(model)

    def made_by_prologue(self, used: Sequence[str]) -> tuple[str, ...]:
        """Returns none of them."""
        del used
        return ()

    def prologue(
        self, entry: StepEntry, limits: ServingLimits, dtype: str, names: Sequence[str]
    ) -> Prologue | None:
        """Returns None: the server makes masks."""

    def finish(self, graph: fx.Graph) -> None:
        """Changes nothing."""

    def sampler(self, signature: SamplerSignature, num_logprobs: int) -> SamplerGraph:
        """Returns the sampler's graph."""
        return SamplerGraph(signature, num_logprobs)

    def exchange(self, limits: ServingLimits) -> tuple[nn.Module, ...]:
        """Returns one graph: two would copy the whole cache."""
        del limits
        return (SwapGraph(),)


def form_of(dialect: Dialect) -> Form:
    """Returns what a dialect's graphs are."""
    return AtenForm() if dialect.name == "aten" else HpuForm(dialect)
