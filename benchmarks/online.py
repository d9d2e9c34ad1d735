"""A bundle in this process, loaded as llm/assemble.py does, and steps that fill its buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from aotgaudi.backends.online import check_target, make_runtime
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.verify import hold_bundle
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.llm.assemble import make_engine
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Artifacts, Loader
from aotgaudi.runtime.memory import keep_freed_memory
from aotgaudi.runtime.weights import ShardReader

GREEDY = SamplingRow()


@dataclass(frozen=True)
class Online:
    """What a server has before it listens."""

    manifest: Manifest
    table: BucketTable
    runner: ProgramRunner
    model_dir: Path

    def engine(self, on_step: Callable[..., None] | None = None) -> Engine:
        """An engine as the server makes it, not started."""
        return make_engine(
            self.manifest, self.runner, Tokenizer.load(ModelDirectory(self.model_dir)), on_step=on_step
        )

    def full_prompt(self, entry: PromptEntry, random: Random) -> PromptStep:
        """A step that fills a prompt bucket, as far as a sequence may be long."""
        limits = self.manifest.spec.limits
        start = entry.num_ctx_blocks * limits.block_size
        length = max(1, min(entry.query_len, limits.max_model_len - start))
        table = self._blocks(0, -(-(start + length) // limits.block_size))
        rows = (
            PromptRow(self._token_ids(length, random), start, table, GREEDY) for _ in range(entry.batch_size)
        )
        return PromptStep(entry, tuple(rows))

    def full_decode(self, entry: DecodeEntry, random: Random) -> DecodeStep:
        """A step that fills a decode bucket, as far as its sequences may be long."""
        limits = self.manifest.spec.limits
        rows, first = [], 0
        for row in range(entry.batch_size):
            share = entry.num_blocks // entry.batch_size + (row < entry.num_blocks % entry.batch_size)
            num_blocks = max(1, min(share, limits.max_blocks_per_seq))
            position = min(num_blocks * limits.block_size, limits.max_model_len) - 1
            rows.append(
                DecodeRow(self._token_ids(1, random)[0], position, self._blocks(first, num_blocks), GREEDY)
            )
            first += num_blocks
        return DecodeStep(entry, tuple(rows))

    def decode(self, batch_size: int, context: int, random: Random) -> DecodeStep | str:
        """A step for `batch_size` sequences of `context` tokens each, the newest included; or why not."""
        limits = self.manifest.spec.limits
        num_blocks = -(-context // limits.block_size)
        if batch_size > limits.max_num_seqs:
            return f"max_num_seqs is {limits.max_num_seqs}"
        if context > limits.max_model_len:
            return f"max_model_len is {limits.max_model_len}"
        if batch_size * num_blocks > limits.num_blocks:
            return f"num_blocks is {limits.num_blocks}"
        entry = self.table.find_decode(batch_size, batch_size * num_blocks)
        if entry is None:
            return "no entry covers it"
        rows = (
            DecodeRow(
                self._token_ids(1, random)[0], context - 1, self._blocks(row * num_blocks, num_blocks), GREEDY
            )
            for row in range(batch_size)
        )
        return DecodeStep(entry, tuple(rows))

    def prefill(self, length: int, random: Random) -> list[PromptStep] | str:
        """The chunks of one prompt, cut as the scheduler cuts them; or why not."""
        limits = self.manifest.spec.limits
        if length > limits.max_model_len - 1:
            return f"max_model_len is {limits.max_model_len}"
        token_ids, steps, start = self._token_ids(length, random), [], 0
        table = self._blocks(0, -(-length // limits.block_size))
        while start < length:
            num_ctx_blocks, rest = start // limits.block_size, length - start
            longest = min(rest, limits.max_num_batched_tokens, self.table.max_query_len(num_ctx_blocks))
            chunk = longest if longest == rest else longest - longest % limits.block_size
            entry = self.table.find_prompt(1, chunk, num_ctx_blocks) if chunk > 0 else None
            if entry is None:
                return "no entry covers it"
            sampling = GREEDY if chunk == rest else None
            steps.append(
                PromptStep(entry, (PromptRow(token_ids[start : start + chunk], start, table, sampling),))
            )
            start += chunk
        return steps

    def _token_ids(self, count: int, random: Random) -> tuple[int, ...]:
        return tuple(random.randrange(self.manifest.spec.model.vocab_size) for _ in range(count))

    def _blocks(self, first: int, count: int) -> tuple[int, ...]:
        """Block ids from `first` on, going round where there are fewer blocks. Block 0 is padding."""
        return tuple(
            1 + number % self.manifest.spec.limits.num_blocks for number in range(first, first + count)
        )


def load(bundle_dir: Path, model_dir: Path, threads: int, *, keep_memory: bool = True) -> Online:
    """Verifies and loads a bundle. `keep_memory` tunes malloc as the server does."""
    bundle = open_bundle(bundle_dir)
    manifest = bundle.manifest
    check_target(bundle.receipt.target)
    if keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)  # As the server: only the thread that computes has an OpenMP pool.
    verified = hold_bundle(bundle)
    verified.report.raise_if_bad(bundle_dir)
    executables = ExecutableTable()
    executables.declare_samplers(manifest.entries)
    loader = Loader(
        make_runtime(bundle.receipt.target),
        ShardReader(ModelDirectory(model_dir)),
        manifest.spec.limits.num_blocks,
    )
    loader.load(
        manifest.entries,
        Artifacts(bundle.receipt, verified.program, verified.read, verified.path),
        executables,
    )
    runner = ProgramRunner(executables, manifest.spec.limits.block_size, num_threads=threads)
    return Online(manifest, BucketTable.from_entries(manifest.entries), runner, model_dir)
