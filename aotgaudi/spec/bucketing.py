"""Which shapes are enumerated: a public strategy, at a named version of its rules."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT

StrategyName = Literal["exponential", "linear", "padding_aware", "file", "unified", "tuned"]

VersionName = Literal[
    "vllm-gaudi@091bbad",
    "vllm-gaudi@v0.26.0",
    "vllm-gaudi@v0.24.0",
    "vllm-gaudi@v0.21.0",
    "vllm-gaudi@v0.19.1",
    "vllm-gaudi@v0.20.0rc0",
    "vllm-gaudi@v0.17.1",
    "vllm-gaudi@v0.16.0",
    "vllm-gaudi@v0.14.1",
    "vllm-gaudi@v0.13.0",
    "vllm-gaudi@v0.11.2",
    "vllm-gaudi@v0.10.1",
    "vllm-hpu-extension@7717587",
    "vllm-hpu-extension@8211e0b",
    "vllm-hpu-extension@ad55828",
    "vllm-hpu-extension@29bc7a4",
    "vllm-hpu-extension@2b4ba56",
]

NEWEST_RELEASE: VersionName = "vllm-gaudi@v0.26.0"
"""The newest release. The first version above is a later commit, which is in none."""


class AxisBounds(SpecValue):
    """Bounds that the user sets for one dimension; None leaves the strategy's default.

    Upstream's ``VLLM_{PROMPT,DECODE}_<DIM>_BUCKET_{MIN,STEP,MAX,LIMIT,PAD_MAX,PAD_PERCENT}``. The version
    decides which of them a strategy heeds; what upstream ignores is ignored here, too.
    """

    min: int | None = Field(default=None, ge=0, le=LARGEST_LIMIT)
    step: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
    max: int | None = Field(default=None, ge=0, le=LARGEST_LIMIT)
    limit: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)
    pad_max: int | None = Field(default=None, ge=0, le=LARGEST_LIMIT)
    pad_percent: int | None = Field(default=None, ge=0, le=50)


class PromptBounds(SpecValue):
    """Bounds of the prompt phase's dimensions."""

    batch_size: AxisBounds = AxisBounds()
    query_len: AxisBounds = AxisBounds()
    num_ctx_blocks: AxisBounds = AxisBounds()


class DecodeBounds(SpecValue):
    """Bounds of the decode phase's dimensions."""

    batch_size: AxisBounds = AxisBounds()
    num_blocks: AxisBounds = AxisBounds()


class SlidingSpec(SpecValue):
    """Sliced fused attention (upstream's PT_HPU_SDPA_QKV_SLICE_MODE_FWD).

    Queries of at least `threshold` tokens (VLLM_FUSEDSDPA_SLIDE_THLD) without context must be multiples of
    `slice_len` tokens (PT_HPU_SDPA_BC_FACTOR).
    """

    threshold: int = Field(default=8192, ge=1, le=LARGEST_LIMIT)
    slice_len: int = Field(default=1024, ge=1, le=LARGEST_LIMIT)


Pair = tuple[Annotated[int, Field(ge=0, le=LARGEST_LIMIT)], Annotated[int, Field(ge=0, le=LARGEST_LIMIT)]]


class TunedBuckets(SpecValue):
    """The buckets of the ``tuned`` strategy: each is one entry. Ascending, each once.

    `prompts`: (query length, context blocks) of chunks of one sequence. `decodes`: (batch size, blocks). The choice
    depends on traffic, so a spec holds the result (docs/adr/0008-bucket-tables.md).
    """

    prompts: tuple[Pair, ...]
    decodes: tuple[Pair, ...]

    @model_validator(mode="after")
    def _check_pairs(self) -> TunedBuckets:
        for name, pairs, least in (("prompts", self.prompts, (1, 0)), ("decodes", self.decodes, (1, 1))):
            where = f"bucketing.tuned.{name}"
            if not pairs:
                raise SpecError(where, "is empty", "at least one pair")
            if list(pairs) != sorted(set(pairs)):
                raise SpecError(where, "is not in order", "ascending pairs, each one once")
            small = next((pair for pair in pairs if pair[0] < least[0] or pair[1] < least[1]), None)
            if small is not None:
                raise SpecError(where, f"has {list(small)}", f"at least {list(least)}")
        return self


class BucketingSpec(SpecValue):
    """Names one strategy and version of ``aotgaudi.bucketing.versions``, and its options.

    `coverage`: ``closed`` adds to the public table the fewest entries that give every reachable step one;
    ``upstream`` keeps the public table, holes included. `max_padding`: an added prompt entry is at most this many times
    as long as the queries that it is added for.

    `contiguous_pa`: decode buckets for contiguous paged attention, where a step spans all blocks up to its
    highest one. `prefix_caching`: prompts may start after cached blocks (the extension's versions have
    contexts only then). `merged_prefill`: all chunks of a step are one row. `skip_decode_block_clamp`: for
    hybrid and interleaved sliding-window models. `mamba_chunk_size`: 0 without mamba layers.
    `file_text`: the content of a bucket file, of the ``file`` strategy (a spec in TOML names it as `file`).
    `short_queries`: query lengths, ascending, of prompt entries that we add after each context of the table: for chunks
    that run with decodes, short prompts, and the rest of a prompt after cached blocks.
    `tuned`: the buckets of the ``tuned`` strategy, which is our own and the same in every version (``aotgaudi tune``).
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"short_queries", "tuned"})

    strategy: StrategyName = "exponential"
    version: VersionName = "vllm-gaudi@091bbad"
    coverage: Literal["closed", "upstream"] = "closed"
    max_padding: float = Field(default=2.0, ge=1)
    contiguous_pa: bool = False
    prefix_caching: bool = True
    merged_prefill: bool = False
    num_speculative_tokens: int = Field(default=0, ge=0, le=1024)
    mamba_chunk_size: int = Field(default=0, ge=0, le=LARGEST_LIMIT)
    mamba_chunk_size_is_explicit: bool = False
    skip_decode_block_clamp: bool = False
    sliding: SlidingSpec | None = None
    prompt: PromptBounds = PromptBounds()
    decode: DecodeBounds = DecodeBounds()
    file_text: str | None = None
    short_queries: tuple[Annotated[int, Field(ge=1, le=LARGEST_LIMIT)], ...] = ()
    tuned: TunedBuckets | None = None

    @model_validator(mode="after")
    def _check_short_queries(self) -> BucketingSpec:
        if list(self.short_queries) != sorted(set(self.short_queries)):
            raise SpecError(
                "bucketing.short_queries",
                f"is {list(self.short_queries)}",
                "ascending lengths in tokens, each one once",
            )
        return self

    @model_validator(mode="after")
    def _check_file(self) -> BucketingSpec:
        if (self.strategy == "file") != (self.file_text is not None):
            raise SpecError(
                "bucketing.file",
                "is missing" if self.strategy == "file" else f"is given with strategy {self.strategy!r}",
                'strategy = "file" and file = "PATH" go together',
            )
        return self

    @model_validator(mode="after")
    def _check_tuned(self) -> BucketingSpec:
        if (self.strategy == "tuned") != (self.tuned is not None):
            raise SpecError(
                "bucketing.tuned",
                "is missing" if self.strategy == "tuned" else f"is given with strategy {self.strategy!r}",
                'strategy = "tuned" and the table [bucketing.tuned] go together: `aotgaudi tune` writes both',
            )
        return self
