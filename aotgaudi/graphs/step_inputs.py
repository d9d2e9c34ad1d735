"""The tensors that a step takes: names, shapes and meaning. Imports no torch.

The tracer (offline) and the runner (online) both read this table, so they cannot disagree. A program lists
the inputs that it uses. Prompt ``(b, q, c)``, block size B; row r holds up to `q` new tokens, then padding:

==================  ======================  =======  ======================================================
input_ids           [b * q]                 int64    token ids, 0 where padded
positions           [b * q]                 int64    position in the sequence, 0 where padded
slots               [b * q]                 int64    ``block * B + offset`` to write K and V to; padding
                                                     writes to block 0
ctx_blocks          [b, c]                  int64    ids of the blocks of cached context, 0 where padded
                                                     (absent when c = 0)
logits_indices      [b]                     int64    index into the flat tokens whose logits are wanted
mask                [b, 1, q, c * B + q]    bool     what a query sees: cached tokens, then new ones; padding
                                                     sees nothing
mask_w<W>           [b, 1, q, c * B + q]    bool     the same under a sliding window of W tokens
==================  ======================  =======  ======================================================

With layers that compress r tokens into an entry, made of S tokens (`aotgaudi.spec.cache_rows`), also these. A chunk
completes at most w = ceil(q / r) windows of r tokens, wherever it starts; a decode step at most w = 1 a row, with q = 1:

====================  ===================================  =====  ============================================
windows_r<r>          [b, w, S]                            int64  slots of what each window is made of, up to
                                                                  its last token; 0 where nothing is
windows_seen_r<r>     [b, w, S]                            bool   False before the sequence's first token, and
                                                                  where no window is completed
entry_slots_r<r>      [b * w]                              int64  ``block * (B / r) + offset`` to write the
                                                                  entry to; padding goes to block 0
entry_positions_r<r>  [b * w]                              int64  the window's first token, 0 where padded
mask_w<W>_r<r>        [b, 1, q, c * (B + B / r) + q + w]   bool   (prompt) of each cached block its tokens, then
                                                                  its entries; then new tokens; then new entries
mask_w<W>_r<r>        [n, B + B / r]                       bool   (decode) of each block its tokens, then its
                                                                  entries
====================  ===================================  =====  ============================================

An entry is seen from its last token on. Decode ``(b, 1, n)``, flat over n blocks as in vLLM-Gaudi's flat paged attention:

==================  ======================  =======  ======================================================
input_ids           [b]                     int64    the newest token of every row
positions           [b]                     int64    its position
slots               [b]                     int64    where its K and V go
block_list          [n]                     int64    ids of the blocks of all rows, 0 where padded
block_rows          [n]                     int64    the row that a block belongs to, 0 where padded
mask                [n, B]                  bool     which tokens of a block its row sees; none of padding
mask_w<W>           [n, B]                  bool     the same under a sliding window of W tokens
==================  ======================  =======  ======================================================

In the hpu dialect no mask is an input. Beside `input_ids`, `positions`, `slots`, `ctx_blocks` and `logits_indices` a step
takes what its masks follow from, and makes them on the device:

==================  ======================  =======  ======================================================
starts              [b]                     int64    (prompt) how many tokens of the row are cached
num_padding         [b]                     int32    (prompt) how many of the row's q tokens are padding
block_ends          [n]                     int64    (decode, with `block_list` and `block_rows`) how many
                                                     tokens the row has from the block's start on, the newest
                                                     included; 0 where padded
pool_rows           [n]                     int64    (contiguous decode, with no list of blocks) the row that
                                                     block i + 1 of the cache belongs to, 0 where to none
pool_ends           [n]                     int64    (contiguous decode) its `block_ends`; 0 where it belongs
                                                     to no row
==================  ======================  =======  ======================================================

Sampler ``b`` takes the inputs that its signature needs:

==================  ======================  =======  ======================================================
logits              [b, vocab]              model's  as the step gives them
temperature         [b]                     float32  0: greedy                     (all but greedy)
top_p               [b]                     float32  1: keeps all                  (filtered and more)
top_k               [b]                     int64    0: keeps all                  (filtered and more)
noise               [b]                     float64  uniform in [0, 1)             (all but greedy); float32 in
                                                     the hpu dialect
min_p               [b]                     float32  0: keeps all                  (min_p and more)
top_n_sigma         [b]                     float32  0: keeps all                  (top_n_sigma)
presence_penalty    [b]                     float32  0: none                       (penalties)
frequency_penalty   [b]                     float32  0: none                       (penalties)
repetition_penalty  [b]                     float32  1: none                       (penalties)
output_counts       [b, vocab]              float32  how often each token was generated  (penalties)
prompt_mask         [b, vocab]              bool     which tokens the prompt has   (penalties)
token_mask          [b, ceil(vocab / 32)]   int32    bit i of word w: whether token 32 w + i is allowed
                                                     (constraints)
bias_token_ids      [b, 300]                int64    distinct; 0 where padded      (constraints)
biases              [b, 300]                float32  added to their logits; 0 where padded  (constraints)
==================  ======================  =======  ======================================================

and returns tokens [b] int64; with log-probabilities also the token's [b] f32, and the N likeliest tokens and
theirs, [b, N] int64 and f32, the likeliest first. Defragmenter ``n``: sources [n], destinations [n], 0 where
padded.

Masks are small and follow from lengths. As inputs they keep the graphs before the first
layer independent of the context, so that all buckets with the same number of tokens share those graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.graphs.dialect import ATEN, Dialect
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.spec.cache_rows import Compression
from aotgaudi.spec.sampler_signature import NUM_BIASED_TOKENS, SamplerSignature, SamplerWork

CONSTRAINT_INPUTS = ("token_mask", "bias_token_ids", "biases")
Window = Optional[int]
"""A sliding window in tokens, the token itself included; None: no window."""


_COUNT = "[1-9][0-9]{0,8}"
_MASK = re.compile(f"mask(?:_w(?P<window>{_COUNT})(?:_r(?P<every>{_COUNT}))?)?")
_OF_ENTRIES = re.compile(f"(?P<kind>windows|windows_seen|entry_slots|entry_positions)_r(?P<every>{_COUNT})")


@dataclass(frozen=True, slots=True)
class MaskKind:
    """What a mask is over: tokens under `window`, and entries for `every` so many tokens (None: tokens only)."""

    window: Window
    every: int | None = None

    @property
    def name(self) -> str:
        """The name of the input."""
        window = "" if self.window is None else f"_w{self.window}"
        return f"mask{window}" if self.every is None else f"mask{window}_r{self.every}"

    @classmethod
    def of(cls, name: str) -> MaskKind | None:
        """Returns the kind of a mask by its name; None for another input."""
        found = _MASK.fullmatch(name)
        if found is None:
            return None
        window, every = found["window"], found["every"]
        return cls(None if window is None else int(window), None if every is None else int(every))


def mask_name(window: Window) -> str:
    """Returns the name of the mask input over tokens, for a window."""
    return MaskKind(window).name


def entries_input(name: str) -> tuple[str, int] | None:
    """Returns the kind and the r of an input that says which entries a step makes; None for another input."""
    found = _OF_ENTRIES.fullmatch(name)
    return None if found is None else (found["kind"], int(found["every"]))


def num_completed(query_len: int, every: int) -> int:
    """Returns how many windows of `every` tokens a chunk of `query_len` tokens completes at most, wherever it starts."""
    return -(-query_len // every)


def prompt_inputs(
    entry: PromptEntry,
    block_size: int,
    windows: Iterable[Window],
    compressions: Iterable[Compression] = (),
) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a prefill step, in order. `compressions`: those of the model's layers."""
    b, q, c = entry.batch_size, entry.query_len, entry.num_ctx_blocks
    return (
        *(_ids(name, b * q) for name in ("input_ids", "positions", "slots")),
        *([_ids("ctx_blocks", b, c)] if c else []),
        _ids("logits_indices", b),
        *(_flags(mask_name(window), b, 1, q, c * block_size + q) for window in windows),
        *_compressed(
            compressions,
            b,
            q,
            lambda every, w: (b, 1, q, c * (block_size + block_size // every) + q + w),
        ),
    )


def decode_inputs(
    entry: DecodeEntry,
    block_size: int,
    windows: Iterable[Window],
    compressions: Iterable[Compression] = (),
) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a decode step, in order. `compressions`: as in `prompt_inputs`."""
    b, n = entry.batch_size, entry.num_blocks
    return (
        *(_ids(name, b) for name in ("input_ids", "positions", "slots")),
        *(_ids(name, n) for name in ("block_list", "block_rows")),
        *(_flags(mask_name(window), n, block_size) for window in windows),
        *_compressed(compressions, b, 1, lambda every, _: (n, block_size + block_size // every)),
    )


def _compressed(
    compressions: Iterable[Compression],
    batch_size: int,
    query_len: int,
    mask_shape: Callable[[int, int], tuple[int, ...]],
) -> Iterator[TensorSpec]:
    """Yields the inputs of each ratio. `mask_shape` is a function of the ratio and of the windows that may be completed."""
    num_read: dict[tuple[int, int], int] = {}
    for compression in compressions:
        key = compression.every, compression.window
        num_read[key] = max(num_read.get(key, 0), compression.num_read)
    for (every, window), size in num_read.items():
        w = num_completed(query_len, every)
        yield _ids(f"windows_r{every}", batch_size, w, size)
        yield _flags(f"windows_seen_r{every}", batch_size, w, size)
        yield _ids(f"entry_slots_r{every}", batch_size * w)
        yield _ids(f"entry_positions_r{every}", batch_size * w)
        yield _flags(MaskKind(window, every).name, *mask_shape(every, w))


def hpu_inputs(entry: PromptEntry | DecodeEntry, dialect: Dialect) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a step in the hpu dialect, in order."""
    b = entry.batch_size
    if isinstance(entry, PromptEntry):
        num_tokens, c = b * entry.query_len, entry.num_ctx_blocks
        return (
            *(_ids(name, num_tokens) for name in ("input_ids", "positions", "slots")),
            *((_ids("ctx_blocks", b, c), _ids("starts", b)) if c else ()),
            *(_ids("logits_indices", b), TensorSpec(name="num_padding", shape=(b,), dtype="int32")),
        )
    blocks = (
        ("pool_rows", "pool_ends") if dialect.is_contiguous else ("block_list", "block_rows", "block_ends")
    )
    return (
        *(_ids(name, b) for name in ("input_ids", "positions", "slots")),
        *(_ids(name, entry.num_blocks) for name in blocks),
    )


def sampler_inputs(
    batch_size: int, signature: SamplerSignature, vocab_size: int, dtype: str, dialect: Dialect = ATEN
) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a sampler, in order; `dtype` is that of the logits."""
    b, work = batch_size, signature.work
    specs = [TensorSpec(name="logits", shape=(b, vocab_size), dtype=dtype)]
    if work > SamplerWork.GREEDY:
        specs.append(_floats("temperature", b))
    if work >= SamplerWork.FILTERED:
        specs += (_floats("top_p", b), _ids("top_k", b))
    if work > SamplerWork.GREEDY:
        specs.append(TensorSpec(name="noise", shape=(b,), dtype=dialect.noise_dtype))
    if work >= SamplerWork.MIN_P:
        specs.append(_floats("min_p", b))
    if work >= SamplerWork.TOP_N_SIGMA:
        specs.append(_floats("top_n_sigma", b))
    if signature.penalties:
        specs += (_floats(f"{kind}_penalty", b) for kind in ("presence", "frequency", "repetition"))
        specs += (_floats("output_counts", b, vocab_size), _flags("prompt_mask", b, vocab_size))
    if signature.constraints:
        specs.append(TensorSpec(name="token_mask", shape=(b, num_mask_words(vocab_size)), dtype="int32"))
        specs += (_ids("bias_token_ids", b, NUM_BIASED_TOKENS), _floats("biases", b, NUM_BIASED_TOKENS))
    return tuple(specs)


def num_mask_words(vocab_size: int) -> int:
    """Returns how many words of 32 bits hold a bit for each token."""
    return -(-vocab_size // 32)


def _ids(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="int64")


def _flags(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="bool")


def _floats(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32")
