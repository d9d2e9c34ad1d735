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

Decode ``(b, 1, n)``, flat over n blocks as in vLLM-Gaudi's flat paged attention:

==================  ======================  =======  ======================================================
input_ids           [b]                     int64    the newest token of every row
positions           [b]                     int64    its position
slots               [b]                     int64    where its K and V go
block_list          [n]                     int64    ids of the blocks of all rows, 0 where padded
block_rows          [n]                     int64    the row that a block belongs to, 0 where padded
row_blocks          [b, n]                  bool     True where block n belongs to row b (only
                                                     the batch-invariant mode takes it)
mask                [n, B]                  bool     which tokens of a block its row sees; none of padding
mask_w<W>           [n, B]                  bool     the same under a sliding window of W tokens
==================  ======================  =======  ======================================================

Sampler ``b`` takes the inputs that its signature needs:

==================  ======================  =======  ======================================================
logits              [b, vocab]              model's  as the step gives them
temperature         [b]                     float32  0: greedy                     (all but greedy)
top_p               [b]                     float32  1: keeps all                  (filtered, min_p)
top_k               [b]                     int64    0: keeps all                  (filtered, min_p)
noise               [b]                     float64  uniform in [0, 1)             (all but greedy)
min_p               [b]                     float32  0: keeps all                  (min_p)
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

Masks and row_blocks are small and follow from lengths. As inputs they keep the graphs before the first
layer independent of the context, so that all buckets with the same number of tokens share those graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.spec.sampler_signature import NUM_BIASED_TOKENS, SamplerSignature, SamplerWork

CONSTRAINT_INPUTS = ("token_mask", "bias_token_ids", "biases")
Window = Optional[int]
"""A sliding window in tokens, the token itself included; None: no window."""


def mask_name(window: Window) -> str:
    """Returns the name of the mask input for a window."""
    return "mask" if window is None else f"mask_w{window}"


def mask_window(name: str) -> Window:
    """Returns the window of a mask input: the inverse of `mask_name`."""
    return None if name == "mask" else int(name.removeprefix("mask_w"))


def prompt_inputs(entry: PromptEntry, block_size: int, windows: Iterable[Window]) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a prefill step, in order."""
    b, q, c = entry.batch_size, entry.query_len, entry.num_ctx_blocks
    return (
        *(_ids(name, b * q) for name in ("input_ids", "positions", "slots")),
        *([_ids("ctx_blocks", b, c)] if c else []),
        _ids("logits_indices", b),
        *(_flags(mask_name(window), b, 1, q, c * block_size + q) for window in windows),
    )


def decode_inputs(entry: DecodeEntry, block_size: int, windows: Iterable[Window]) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a decode step, in order."""
    b, n = entry.batch_size, entry.num_blocks
    return (
        *(_ids(name, b) for name in ("input_ids", "positions", "slots")),
        *(_ids(name, n) for name in ("block_list", "block_rows")),
        _flags("row_blocks", b, n),
        *(_flags(mask_name(window), n, block_size) for window in windows),
    )


def sampler_inputs(
    batch_size: int, signature: SamplerSignature, vocab_size: int, dtype: str
) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a sampler, in order; `dtype` is that of the logits."""
    b, work = batch_size, signature.work
    specs = [TensorSpec(name="logits", shape=(b, vocab_size), dtype=dtype)]
    if work > SamplerWork.GREEDY:
        specs.append(_floats("temperature", b))
    if work >= SamplerWork.FILTERED:
        specs += (_floats("top_p", b), _ids("top_k", b))
    if work > SamplerWork.GREEDY:
        specs.append(TensorSpec(name="noise", shape=(b,), dtype="float64"))
    if work >= SamplerWork.MIN_P:
        specs.append(_floats("min_p", b))
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
