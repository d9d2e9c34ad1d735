"""The cost of a step, padding included. `aotgaudi tune` minimizes this cost, and reports measure padding by it.

The work of an entry is a sum of integers, an estimate in floating-point operations. Let B be the block size::

    prompt (b, q, c)   rows b    tokens b * q   pairs b * q * (c * B + q)   keys b * c * B
    decode (b, 1, n)   rows b    tokens b       pairs n * B                 keys n * B

    work = rows * per_row + tokens * per_token + pairs * per_pair + keys * per_key

A token passes all weights of attention and of the feed-forward part, with two operations each. In a mixture of experts, it
passes only the weights of its experts. A row passes the head. A pair of query and key takes 2 operations per query head for
each number of the row that the layer keeps of a token, both as a key and as a value (``spec/cache_rows.py``). If a layer
keeps one row for several tokens, it has proportionally fewer pairs. Windows count as whole contexts. Reading a token's rows
from memory counts as the operations that the device could have done in that time (`Device.balance`). Costs that are the same
for every step, above all reading the weights, are equal for all tables and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.memory import kv_bytes_read_per_token
from aotgaudi.spec.build_spec import BuildSpec, ParallelSpec
from aotgaudi.spec.cache_rows import family_of, rows_of
from aotgaudi.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Device:
    """A device's peak rates as stated by its maker: operations a second (16-bit, dense), bytes a second from memory."""

    teraflops: int
    gigabytes: int
    source: str

    @property
    def balance(self) -> int:
        """How many operations take as long as reading a byte from memory."""
        return round(1000 * self.teraflops / self.gigabytes)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "gaudi2": Device(432, 2450, "Intel Gaudi 2 AI accelerator: BF16 matrix engine, HBM2E"),
        "gaudi3": Device(1835, 3700, "Intel Gaudi 3 AI Accelerator White Paper: BF16 matrix engine, HBM2e"),
        "h100": Device(989, 3350, "NVIDIA H100 Tensor Core GPU data sheet: SXM5, BF16 without sparsity"),
        "h200": Device(989, 4800, "NVIDIA H200 Tensor Core GPU data sheet: SXM, BF16 without sparsity"),
        "cpu": Device(2, 100, "assumed: some cores of a server"),
    }
)
_BY_BACKEND = {"hpu": "gaudi3", "cuda": "h100", "cpu": "cpu", "fake": "cpu"}


def device_of(spec: BuildSpec, name: str | None = None) -> Device:
    """Returns a device of `DEVICES`. The default is the profile of the spec's target, or the usual one of its backend."""
    target = spec.target
    usual = DEVICES[_BY_BACKEND[target.backend]]
    return DEVICES[name] if name else DEVICES.get(target.profile or "", usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Computes work. A step takes `step_seconds`, and a second for each `per_second` of its work."""

    block_size: int
    per_row: int
    per_token: int
    per_pair: int
    per_key: int
    per_second: float
    step_seconds: float

    @classmethod
    def of(cls, spec: BuildSpec, device: Device) -> WorkModel:
        """Returns the estimate for a model on a device that reaches half of its peak rate.

        Raises:
            SpecError: the model's config lacks a size.
        """
        model = spec.model
        whole = spec.model_copy(update={"parallel": ParallelSpec()})  # Whatever the number of ranks.
        weights = _weights_per_token(model)
        weight_bytes = 2 * (weights + model.hidden_size * model.vocab_size)
        return cls(
            block_size=spec.limits.block_size,
            per_row=2 * model.hidden_size * model.vocab_size,
            per_token=2 * weights,
            per_pair=2 * model.num_attention_heads * _attended_per_token(model, spec.limits.block_size),
            per_key=kv_bytes_read_per_token(whole) * device.balance,
            per_second=device.teraflops * 1e12 / 2,
            step_seconds=2 * weight_bytes / (device.gigabytes * 1e9),
        )

    def work(self, entry: StepEntry) -> int:
        """Returns the work of a step that fills `entry`."""
        if isinstance(entry, PromptEntry):
            return self.prompt_work(entry.query_len, entry.num_ctx_blocks, entry.batch_size)
        return self.decode_work(entry.num_blocks, entry.batch_size)

    def prompt_work(self, query_len: int, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the work of chunks of prompts."""
        keys = num_ctx_blocks * self.block_size
        tokens = query_len * (self.per_token + (keys + query_len) * self.per_pair)
        return batch_size * (self.per_row + tokens + keys * self.per_key)

    def decode_work(self, num_blocks: int, batch_size: int) -> int:
        """Returns the work of one token for each of `batch_size` sequences."""
        keys = num_blocks * self.block_size
        return batch_size * (self.per_row + self.per_token) + keys * (self.per_pair + self.per_key)

    def seconds(self, entry: StepEntry) -> float:
        """Returns how long a step of `entry` takes in this model."""
        return self.step_seconds + self.work(entry) / self.per_second


def _weights_per_token(model: ModelSpec) -> int:
    """Returns the number of weights that a token passes, without embedding and head."""
    experts = model.config.get("num_experts_per_tok")
    wide = model.config.get("moe_intermediate_size") if isinstance(experts, int) else None
    width = wide if isinstance(wide, int) else model.intermediate_size
    num_experts = experts if isinstance(experts, int) and not isinstance(experts, bool) else 1
    if num_experts < 1:
        raise SpecError("model.config.num_experts_per_tok", f"is {num_experts}", "a positive integer")
    return model.num_layers * (_projections(model) + 3 * model.hidden_size * num_experts * width)


def _attended_per_token(model: ModelSpec, block_size: int) -> int:
    """Returns how many numbers of a token's rows a query head multiplies with in all layers, as keys and as values."""
    values = 0
    for cache in rows_of(model):
        if cache.part:  # The source rows of compression, and the indexer's keys.
            continue
        width = 2 * cache.width
        if family_of(model) == "latent":  # The values are the first part of a row.
            width -= _size(model, "qk_rope_head_dim")
        values += width * cache.rows_per_block(block_size)
    return values // block_size


def _projections(model: ModelSpec) -> int:
    """Returns the number of weights of a layer's attention. Latent attention multiplies by the halves of ``kv_b_proj``."""
    family, heads, hidden = family_of(model), model.num_attention_heads, model.hidden_size
    if family == "uniform":
        return hidden * 2 * (heads + model.num_kv_heads) * model.head_dim
    rank = model.config_value("q_lora_rank")
    if family == "latent":
        latent, rotated = _size(model, "kv_lora_rank"), _size(model, "qk_rope_head_dim")
        unrotated, value = _size(model, "qk_nope_head_dim"), _size(model, "v_head_dim")
        asked, kept = heads * (unrotated + rotated), latent + rotated
        given = heads * (latent * (unrotated + value) + value * hidden)
    else:
        asked, kept = heads * model.head_dim, model.head_dim
        given = _size(model, "o_lora_rank") * (asked + _size(model, "o_groups") * hidden)
    queries = rank * (hidden + asked) if isinstance(rank, int) else hidden * asked
    return queries + hidden * kept + given


def _size(model: ModelSpec, name: str) -> int:
    value = model.config_value(name)
    if type(value) is not int or value < 1:
        raise SpecError(
            f"model.config.{name}", "is missing" if value is None else f"is {value!r}", "a positive integer"
        )
    return value
