"""The kinds of traffic for which a vllm-gaudi server may compile a graph although its table is closed: one row for each.

A closed table is about the shapes of prompts and decodes. The logits and the sampler are graphs of their own, with other
shapes: how many rows are sampled, by which parameters, and for penalties how long prompts and answers are. The server's
warm-up runs few of them (``warmup_sampler``). A row says of a kind whether it is

* **closed**: ``build capture --shapes`` asks for each of its graphs, or it has none of its own;
* **bounded**: no traffic reaches it, by a condition of the limits, which the row names;
* **open**: the first request that needs another of its graphs compiles it while the request waits. The row says how many
  graphs there are, and which flag of the server refuses such requests, if one does.

A request of several kinds is as open as the most open of them. `aotgaudi coverage`, `build manifest`, the receipt of a
capture, `verify`, ``/ready`` and docs/how-to/wrap-vllm-gaudi.md show these rows. vllm-gaudi 0.26.0 on the double is the
judge (tests/guests_real/test_vllm_gaudi.py). Sources are named at v0.26.0 of vllm-gaudi and v0.26.0 of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aotgaudi.document import Value
from aotgaudi.errors import counted

if TYPE_CHECKING:  # A run reads rows from a receipt, and makes none.
    from aotgaudi.spec.build_spec import BuildSpec

State = Literal["closed", "bounded", "open"]
DEFAULT_MAX_LOGPROBS = 20
"""vLLM's ``--max-logprobs`` unless it is given (vllm/config/model.py)."""
_MOST_ROWS = 6
"""The most rows of batches of all sizes that are requested with log-probabilities, for all widths together.

vllm-gaudi lets Dynamo keep ``1 + 5 * number of buckets`` graphs of a function (hpu_model_runner.py 6132). After that many
the sampler runs without graphs, which no start shows. Each row stands for up to 25 graphs and 49 requests.
"""


class LiveGraphs(Value):
    """A kind of traffic, and whether its graphs are all warm."""

    kind: str
    state: State
    text: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Situation:
    """What rows depend on.

    Attributes:
        spec: The server.
        sizes: The batch sizes of its decode table, to which decode steps are padded.
        max_logprobs: Its ``--max-logprobs``; -1 for no bound.
    """

    spec: BuildSpec
    sizes: tuple[int, ...]
    max_logprobs: int

    @property
    def blocks_needed(self) -> int:
        """How many KV blocks hold `max_num_seqs` whole sequences, and vLLM's null block (vllm/v1/core/block_pool.py 190)."""
        limits = self.spec.limits
        return limits.max_num_seqs * -(-limits.max_model_len // limits.block_size) + 1

    @property
    def logprob_widths(self) -> range:
        """The numbers of log-probabilities that are requested in each size: all, or none if these are too many."""
        most = self.max_logprobs
        rows = (most + 1) * sum({1, *self.sizes})
        return range(most + 1) if most >= 0 and rows <= _MOST_ROWS else range(0)

    @property
    def unpadded(self) -> tuple[int, ...]:
        """The numbers of rows of a step with constrained requests, which is not padded, that are no size of the table."""
        return tuple(
            rows for rows in range(1, self.spec.limits.max_num_seqs + 1) if rows not in {1, *self.sizes}
        )


def live_graphs(situation: Situation) -> tuple[LiveGraphs, ...]:
    """Returns the row of each kind that applies, in the order of `_ROWS`."""
    rows = ((kind, row(situation)) for kind, row in _ROWS)
    return tuple(LiveGraphs(kind=kind, state=row[0], text=row[1]) for kind, row in rows if row is not None)


def not_closed(rows: Iterable[LiveGraphs]) -> tuple[str, ...]:
    """Returns the open rows, one line each."""
    return tuple(str(row) for row in rows if row.state == "open")


def unrequested(rows: Iterable[LiveGraphs], level: str) -> tuple[LiveGraphs, ...]:
    """Returns the rows for a capture whose exercise has no requests for shapes, so that nothing is closed by them."""
    return tuple(
        row.model_copy(update={"state": "open", "text": f"{row.text} ({level} requests none)"})
        if row.state == "closed" and row.kind != _IGNORED
        else row
        for row in rows
    )


_IGNORED = "min_p, logit_bias, min_tokens"
_Row = tuple[State, str]


def _always(state: State, text: str) -> Callable[[Situation], _Row]:
    return lambda _: (state, text)


def _chunks(situation: Situation) -> _Row | None:
    """A chunk that ends no prompt has logits of no rows (hpu_model_runner.py 2631)."""
    if not situation.spec.scheduler.chunked_prefill:
        return None
    return "closed", "a chunk that does not end its prompt has logits of no rows, and the exercise sends one"


def _preemption(situation: Situation) -> _Row:
    """A resumed request may be a prompt with logits for each token that it had generated (hpu_model_runner.py 2620-2634).

    It is not if it begins anew and is not interrupted: then its tokens count as a prompt (hpu_input_batch.py 274).
    """
    limits, needed = situation.spec.limits, situation.blocks_needed
    hold = (
        f"{counted(limits.max_num_seqs, 'sequence')} of {limits.max_model_len} tokens and vLLM's null block"
    )
    if not _has_uniform_blocks(situation.spec):
        why = "layers of several kinds share the blocks, so that no number of them is known to suffice"
    elif limits.num_blocks >= needed:
        return "bounded", f"none, because {limits.num_blocks} blocks hold {hold}: that takes {needed}"
    else:
        why = (
            f"{needed} blocks would hold {hold}, and there are {limits.num_blocks}: --num-gpu-blocks-override"
        )
    return "open", (
        "logits and a sampler graph for each number of tokens that a preempted request had generated, if it is resumed"
        f" after cached blocks, or between two chunks ({why})"
    )


def _has_uniform_blocks(spec: BuildSpec) -> bool:
    """Whether a sequence takes one block for each `block_size` tokens, and no others (vLLM's KV cache groups)."""
    return not (spec.bucketing.skip_decode_block_clamp or spec.bucketing.mamba_chunk_size)


def _logprobs(situation: Situation) -> _Row:
    """The width is a constant of the sampler's graph (vllm/v1/sample/sampler.py ``gather_logprobs``)."""
    most = situation.max_logprobs
    if situation.logprob_widths:
        return "closed", (
            f"a sampler graph for each number up to --max-logprobs {most} in each batch size and mix of sampling"
            " parameters: build capture --shapes asks for all"
        )
    closing = _MOST_ROWS // sum({1, *situation.sizes}) - 1
    remedy = (
        f"; build capture --shapes closes it for --max-logprobs {closing} or less" if closing >= 0 else ""
    )
    bound = "the vocabulary" if most < 0 else str(most)
    return "open", (
        f"a sampler graph for each number (--max-logprobs: up to {bound}) in each batch size and mix of sampling"
        f" parameters; --max-logprobs N refuses more than N{remedy}"
    )


def _structured(situation: Situation) -> _Row:
    """Such a step is sampled in as many rows as it has (hpu_model_runner.py 4489, 4560-4569). The CPU masks."""
    missing = situation.unpadded
    if not missing:
        return "closed", "such a step is not padded, and each number of rows is a batch size of the table"
    first = ", ".join(map(str, missing[:4])) + (", ..." if missing[4:] else "")
    return "open", (
        "such a step is not padded: a sampler graph for each number of rows that is no batch size of the table"
        f" ({first}) and each mix of sampling parameters"
    )


def _several_prompts(situation: Situation) -> _Row | None:
    most = situation.spec.limits.max_num_prefill_seqs
    if most == 1:
        return None
    return "open", (
        f"logits and a sampler graph for each number of prompts that a step ends, up to {most}"
        " (VLLM_PROMPT_BS_BUCKET_MAX=1 without VLLM_MERGED_PREFILL: one)"
    )


def _speculation(situation: Situation) -> _Row | None:
    if not situation.spec.bucketing.num_speculative_tokens:
        return None
    return (
        "open",
        "the graphs of the draft model, and of accepting its tokens, are not enumerated (--speculative-config)",
    )


_ROWS: tuple[tuple[str, Callable[[Situation], _Row | None]], ...] = (
    (
        "sampling",
        _always(
            "closed",
            "a sampler graph for each batch size and mix of greedy, temperature, top_k, top_p and seed:"
            " build capture --shapes asks for all",
        ),
    ),
    ("n", _always("closed", "its sequences are rows like those of other requests")),
    (
        _IGNORED,
        # hpu_input_batch.py 552: the state of vLLM's logits processors is never updated.
        _always("closed", "vllm-gaudi ignores them, so they reach no graph"),
    ),
    ("unfinished prompts", _chunks),
    ("preemption", _preemption),
    ("logprobs", _logprobs),
    ("structured outputs", _structured),
    ("several prompts", _several_prompts),
    ("speculative decoding", _speculation),
    (
        "prompt_logprobs",
        # hpu_model_runner.py 3733; `echo` with `logprobs` asks for them, too.
        _always(
            "open",
            "logits of as many rows as a chunk has prompt tokens: a graph for each number; no flag refuses it",
        ),
    ),
    (
        "penalties",
        # hpu_input_batch.py 724-738 and vllm/v1/sample/ops/penalties.py: [rows, longest prompt], [rows, longest answer].
        _always(
            "open",
            "presence, frequency and repetition: a sampler graph for each batch size, length of the longest prompt"
            " and of the longest answer, so nearly each step has another; no flag refuses them",
        ),
    ),
    (
        "allowed_token_ids",
        _always(
            "open", "a sampler graph for each batch size and mix of sampling parameters; no flag refuses it"
        ),
    ),
    (
        "bad_words",
        # vllm/v1/sample/ops/bad_words.py: tokens and rows are constants.
        _always("open", "a sampler graph for each set of words, row and batch size; no flag refuses them"),
    ),
)
