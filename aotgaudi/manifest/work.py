"""What a step costs, padding included: one definition, by which buckets are chosen, and by which padding is reported.

The work of an entry is a sum of integers. Let B be the block size::

    prompt (b, q, c)   rows b    tokens b * q   pairs b * q * (c * B + q)   keys b * c * B
    decode (b, 1, n)   rows b    tokens b       pairs n * B                 keys n * B

    work = step + rows * per_row + tokens * per_token + pairs * per_pair + keys * per_key

**Estimated** (`WorkModel.of`) it is in floating-point operations. A token passes all weights, two operations each: those of
attention and of the feed-forward part, for a mixture of experts those that a token is sent to. A row passes the head.
A pair of query and key takes 4 operations for each head, number of the head, and layer. A key is read from memory, with its
value, in the place of which the device could have done so many operations: its balance. What a step costs whatever its
size, the reading of the weights first of all, is the same for all tables and left out.

**Measured** (`traffic.step_times`) it is in nanoseconds, and has the cost of a step as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Union

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.cost import kv_bytes_per_token
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parallel import ParallelSpec

StepEntry = Union[PromptEntry, DecodeEntry]


@dataclass(frozen=True, slots=True)
class Device:
    """What a device's maker says it can do at most: operations a second (16-bit, dense) and bytes a second from memory."""

    teraflops: int
    gigabytes: int
    source: str

    @property
    def balance(self) -> int:
        """Operations in the time that a byte takes from memory."""
        return round(1000 * self.teraflops / self.gigabytes)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "gaudi2": Device(432, 2450, "Intel Gaudi 2 AI accelerator: BF16 matrix engine, HBM2E"),
        "gaudi3": Device(1835, 3700, "Intel Gaudi 3 AI Accelerator White Paper: BF16 matrix engine, HBM2e"),
        "h100": Device(989, 3350, "NVIDIA H100 Tensor Core GPU data sheet: SXM5, BF16 without sparsity"),
        "h200": Device(989, 4800, "NVIDIA H200 Tensor Core GPU data sheet: SXM, BF16 without sparsity"),
        "cpu": Device(2, 100, "assumed: some cores of a server; measure yours"),
    }
)
_BY_BACKEND = {"hpu": "gaudi3", "cuda": "h100", "cpu": "cpu", "fake": "cpu"}


def device_of(spec: BuildSpec, name: str | None = None) -> Device:
    """Returns a device of `DEVICES`; without a name, the profile of the spec's target, or what its backend stands for."""
    profile = spec.target.profile
    return DEVICES[
        name or (profile if profile in DEVICES and profile is not None else _BY_BACKEND[spec.target.backend])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What each of a step's sizes counts for."""

    per_step: int = 0
    per_row: int = 0
    per_token: int = 0
    per_pair: int = 0
    per_key: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Work in `unit`, of which a step's take `per_second` a second, and `step_seconds` besides."""

    block_size: int
    prompt: Terms
    decode: Terms
    unit: str
    per_second: float
    step_seconds: float = 0.0

    @classmethod
    def of(cls, spec: BuildSpec, device: Device) -> WorkModel:
        """Returns the estimate for a model on a device that does half of what its maker says it can do at most.

        Raises:
            SpecError: the model's config lacks a size.
        """
        model = spec.model
        whole = spec.model_copy(update={"parallel": ParallelSpec()})  # However many ranks share it.
        weights, key_bytes = _weights_per_token(model), kv_bytes_per_token(whole) * model.num_layers
        terms = Terms(
            per_row=2 * model.hidden_size * model.vocab_size,
            per_token=2 * weights,
            per_pair=4 * model.num_attention_heads * model.head_dim * model.num_layers,
            per_key=key_bytes * device.balance,
        )
        weight_bytes = 2 * (weights + model.hidden_size * model.vocab_size)
        return cls(
            block_size=spec.limits.block_size,
            prompt=terms,
            decode=terms,
            unit="FLOP",
            per_second=device.teraflops * 1e12 / 2,
            step_seconds=2 * weight_bytes / (device.gigabytes * 1e9),
        )

    def work(self, entry: StepEntry) -> int:
        """Returns the work of a step that fills `entry`."""
        if isinstance(entry, PromptEntry):
            return self.prompt_work(entry.query_len, entry.num_ctx_blocks, entry.batch_size)
        return self.decode_work(entry.num_blocks, entry.batch_size)

    def prompt_work(self, query_len: int, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns that of chunks of prompts."""
        terms, keys = self.prompt, num_ctx_blocks * self.block_size
        each = (
            terms.per_row
            + query_len * (terms.per_token + (keys + query_len) * terms.per_pair)
            + keys * terms.per_key
        )
        return terms.per_step + batch_size * each

    def decode_work(self, num_blocks: int, batch_size: int) -> int:
        """Returns that of one token for each of `batch_size` sequences."""
        terms, keys = self.decode, num_blocks * self.block_size
        rows = batch_size * (terms.per_row + terms.per_token)
        return terms.per_step + rows + keys * (terms.per_pair + terms.per_key)

    def seconds(self, entry: StepEntry) -> float:
        """Returns how long a step of `entry` may take."""
        return self.step_seconds + self.work(entry) / self.per_second


def _weights_per_token(model: ModelSpec) -> int:
    """The weights that a token passes, those of embedding and head left out."""
    heads = 2 * (model.num_attention_heads + model.num_kv_heads) * model.head_dim
    experts = model.config.get("num_experts_per_tok")
    wide = model.config.get("moe_intermediate_size") if isinstance(experts, int) else None
    width = wide if isinstance(wide, int) else model.intermediate_size
    num_experts = experts if isinstance(experts, int) and not isinstance(experts, bool) else 1
    if num_experts < 1:
        raise SpecError("model.config.num_experts_per_tok", f"is {num_experts}", "a positive integer")
    return model.num_layers * model.hidden_size * (heads + 3 * num_experts * width)
