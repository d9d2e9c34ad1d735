"""Tables of vllm-hpu-extension, and of vllm-gaudi v0.10.1: each query has contexts of its own.

Source: vllm_hpu_extension/bucketing/exponential.py 90-201 and common.py 88-113 at 8211e0b. The lists are
ascending, and may hold a bucket twice, as upstream's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

from aotgaudi.bucketing.filters import is_off_slice_query
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs, check_num_buckets, collector_paused
from aotgaudi.errors import SpecError


class ExtensionSource(Protocol):
    """How the values of each dimension are chosen: what sets one strategy apart from another."""

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase."""
        ...

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase."""
        ...

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query with prefix caching, in blocks, ascending; some may be there twice."""
        ...

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionRules:
    """What differs between versions and strategies; the defaults are those of exponential at 8211e0b.

    `limits_query`: a query is at most the model's length. `removes_repetitions`: where the filter leaves
    something, each bucket is there once. `slices`: queries that sliced attention cannot run are left out.
    """

    limits_query: bool = True
    removes_repetitions: bool = False
    slices: bool = True


@dataclass(frozen=True, slots=True)
class ExtensionStrategy:
    """A strategy of the extension. See ``strategy.Strategy``."""

    source: ExtensionSource
    rules: ExtensionRules = ExtensionRules()

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending.

        Where the step's tokens leave none, upstream keeps all rather than serve nothing.
        """
        runs = self._runs(inputs)
        fitting = [run for run in (self._fitting(run, inputs) for run in runs) if run.contexts]
        if fitting and self.rules.removes_repetitions:
            fitting = _without_repetitions(fitting)
        kept = fitting or runs
        if self.rules.slices:
            kept = [run for run in kept if not is_off_slice_query(run.query_len, inputs)]
        return _built(kept)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending."""
        return self.source.decode_table(inputs)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets; there is no speculative decoding in these versions."""
        return self.source.decode_table(inputs)

    def _runs(self, inputs: BucketingInputs) -> list[_Run]:
        batch_sizes = sorted(self.source.prompt_batch_sizes(inputs))
        query_lens = sorted(self.source.query_lens(inputs))
        check_num_buckets(len(batch_sizes) * len(query_lens), "prompt")
        contexts = [self._contexts(query_len, inputs) for query_len in query_lens]
        runs = [
            _Run(batch_size, *query)
            for batch_size in batch_sizes
            for query in zip(query_lens, contexts, strict=True)
        ]
        if not any(contexts):
            raise SpecError(
                "limits.max_model_len",
                f"is {inputs.max_model_len}, which leaves no prompt bucket",
                f"at least block_size {inputs.block_size}",
            )
        return runs

    def _contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        return self.source.contexts(query_len, inputs) if inputs.prefix_caching else (0,)

    def _fitting(self, run: _Run, inputs: BucketingInputs) -> _Run:
        """Returns the part of a run that is within the step's tokens; contexts count as well."""
        if self.rules.limits_query and run.query_len > inputs.max_model_len:
            return run._replace(contexts=())
        most_tokens = inputs.max_num_batched_tokens // run.batch_size
        most_context = (most_tokens - run.query_len) // inputs.block_size
        return run._replace(contexts=run.contexts[: bisect_right(run.contexts, most_context)])


class _Run(NamedTuple):
    """Buckets of one batch size and query length."""

    batch_size: int
    query_len: int
    contexts: Sequence[int]


def _without_repetitions(runs: Iterable[_Run]) -> list[_Run]:
    unique = {(run.batch_size, run.query_len): run for run in runs}
    return [run._replace(contexts=sorted(set(run.contexts))) for run in unique.values()]


def _built(runs: Iterable[_Run]) -> tuple[Bucket, ...]:
    runs = list(runs)
    check_num_buckets(sum(len(run.contexts) for run in runs), "prompt")
    table: list[Bucket] = []
    with collector_paused():
        for run in runs:
            table.extend(product((run.batch_size,), (run.query_len,), run.contexts))
    table.sort()
    return tuple(table)
