"""A closed table for a vLLM server that makes its own tables, as a file for VLLM_BUCKETING_FROM_FILE.

The file lists the buckets of a spec. What counts is what a server of that version reads from it: we read the text back by
upstream's rules (``bucketing.bucket_file``), and prove what was read, under upstream's look-up. Four of these rules decide
what a file can express:

1. **A query of one token is always a decode.** Prompts of one token take the next longer bucket.
2. **Rows are filtered.** Up to v0.17.1, and in v0.20.0rc0, query and whole blocks of context must together fit the
   model's length. A chunk of a prompt may start inside a block, and then fits in tokens but not in whole blocks. So for
   these versions no file closes the table of a server with chunked prefill, and `bucket_file_of` names the smallest
   such step. For whole prompts, each longest prompt must be listed: only its own bucket covers it and is kept.
3. **Not every row is warmed up** (``bucketing.upstream``). If several contexts of a query fill the model's length, only the
   smallest is compiled. A step that is looked up to another one compiles it while its request waits. So we list at most one
   of them: the largest that a step needs.
4. **The server adds speculation to the listed rows**, so the file has the rows before speculation. What upstream makes of
   an added row may need further rows, and we add rows until none is missing.

Otherwise upstream reads exactly what is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE, FILE_VARIABLE, bucket_lines
from aotgaudi.bucketing.combine import capped_decode, is_off_slice, keeps_decode, keeps_prompt
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import Coverage, ReachableSteps, close, prompt_holes, prove_steps
from aotgaudi.bucketing.reachable import ReachablePrompts
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import blocks_beside, cold_decodes, cold_prompts, keeps_too_long
from aotgaudi.bucketing.versions import GaudiVersion, find_strategy, find_version
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.manifest.coverage import coverage_of_server, reachable_of
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

_MOST_ROUNDS = 64
"""The most rounds of adding rows. Without speculation two are enough."""


@dataclass(frozen=True)
class BucketFile:
    """A proved bucket file. `spec` is the server's spec with the file as its strategy. Its entries are closed.

    `prompt` and `decode` are the listed rows, ascending, as upstream reads them. Decodes are those before speculation.
    """

    spec: BuildSpec
    prompt: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]

    @property
    def text(self) -> str:
        """The file's content."""
        assert self.spec.bucketing.file_text is not None
        return self.spec.bucketing.file_text

    @property
    def pinned(self) -> Mapping[str, int]:
        """The flags, without dashes, and the values that the server needs for them; the number of KV blocks comes first."""
        return _pinned(self.spec.limits)

    @property
    def switches(self) -> Mapping[str, bool]:
        """The switches, without dashes, that decide which steps the server forms."""
        bucketing = self.spec.bucketing
        return {
            "enable-chunked-prefill": self.spec.scheduler.chunked_prefill,
            "enable-prefix-caching": bucketing.prefix_caching and not bucketing.contiguous_pa,
        }

    def variables(self, path: str) -> Mapping[str, str]:
        """Returns the variables that the server needs if the file lies at `path`."""
        limits, bucketing = self.spec.limits, self.spec.bucketing
        variables = {FILE_VARIABLE: path, "VLLM_CONTIGUOUS_PA": str(bucketing.contiguous_pa).lower()}
        if self.spec.target.execution_mode == "torch_compile":
            variables[DYNAMIC_SHAPES_VARIABLE] = "false"
        if limits.max_num_prefill_seqs > 1:
            variables["VLLM_PROMPT_BS_BUCKET_MAX"] = str(limits.max_num_prefill_seqs)
        if bucketing.sliding is not None:
            variables |= {
                "PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true",
                "PT_HPU_SDPA_BC_FACTOR": str(bucketing.sliding.slice_len),
                "VLLM_FUSEDSDPA_SLIDE_THLD": str(bucketing.sliding.threshold),
            }
        return variables

    @property
    def unset(self) -> tuple[str, ...]:
        """The variables that must not be set, because the server would then read no file, or warm up nothing."""
        names = ["VLLM_ENABLE_BUCKETING", "VLLM_MERGED_PREFILL", "VLLM_SKIP_WARMUP"]
        if find_version(self.spec.bucketing.version).environment.has_unified:
            names.append("VLLM_UNIFIED_ATTN")
        return tuple(names)


def bucket_file_of(spec: BuildSpec) -> BucketFile:
    """Returns the closed table of `spec` as a bucket file, proved for a vLLM server with these limits.

    If the spec describes our own scheduler, the file is for a server with chunked prefill.

    Raises:
        SpecError: the version reads no bucket files, or the spec's server does not use them.
        CoverageError: no file gives every step a warm bucket. Names the smallest step without one.
    """
    server = _server(spec)
    writer = _Writer(server, _version(server), BucketingInputs.from_spec(server.limits, server.bucketing))
    found = writer.read(writer.first_rows())
    if server.bucketing.coverage == "closed":
        for _ in range(_MOST_ROUNDS):
            grown = writer.expressed(found.rows.with_added(writer.closing(found.steps, found.table)))
            if grown == found.rows:
                break
            found = writer.read(grown)
    writer.check(found)
    return BucketFile(found.spec, tuple(sorted(found.rows.prompt)), tuple(sorted(found.rows.decode)))


@dataclass(frozen=True)
class _Rows:
    """The rows of a file."""

    prompt: frozenset[Bucket]
    decode: frozenset[Bucket]

    def with_added(self, other: _Rows) -> _Rows:
        return _Rows(self.prompt | other.prompt, self.decode | other.decode)


@dataclass(frozen=True)
class _Found:
    """What upstream makes of a file. `decode` includes the buckets of speculative decoding."""

    spec: BuildSpec
    rows: _Rows
    prompt: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]

    @property
    def steps(self) -> ReachableSteps:
        return reachable_of(self.spec)

    @property
    def table(self) -> BucketTable:
        """The table for the proof, with prompts of one sequence only: we do not claim that buckets for several are warm."""
        return BucketTable(
            tuple(PromptEntry(*bucket) for bucket in self.prompt if bucket[0] == 1),
            tuple(DecodeEntry(*bucket) for bucket in self.decode),
        )


@dataclass(frozen=True)
class _Writer:
    server: BuildSpec
    version: GaudiVersion
    inputs: BucketingInputs

    def first_rows(self) -> _Rows:
        """Returns the public table, if possible without rows whose warm-up compiles nothing for them."""
        bucketing, inputs = self.server.bucketing, self.inputs
        strategy = find_strategy(bucketing.version, bucketing.strategy)
        rows = _Rows(frozenset(strategy.prompt_table(inputs)), frozenset(strategy.decode_seed_table(inputs)))
        if bucketing.coverage == "upstream":
            return rows
        if bucketing.strategy != "file" and keeps_too_long(self.version.product):
            fitting = {
                bucket
                for bucket in rows.prompt
                if bucket[0] > 1 or bucket[2] <= blocks_beside(bucket[1], inputs)
            }
            rows = _Rows(frozenset(fitting), rows.decode)
        return self._filled(self.expressed(rows))

    def _filled(self, rows: _Rows) -> _Rows:
        """Returns rows of both phases, as upstream requires. A phase without rows gets those that close an empty table."""
        closing = self.expressed(self.closing(reachable_of(self.server), BucketTable((), ())))
        return _Rows(rows.prompt or closing.prompt, rows.decode or closing.decode)

    def expressed(self, rows: _Rows) -> _Rows:
        """Returns the rows that upstream keeps and can warm up."""
        rules, inputs = self.version.product, self.inputs
        prompts = {
            bucket
            for bucket in rows.prompt
            if bucket[1] > 1 and keeps_prompt(bucket, inputs, rules) and not is_off_slice(bucket, inputs)
        }
        decodes = {
            capped_decode(bucket, inputs, rules) for bucket in rows.decode if keeps_decode(bucket, inputs)
        }
        return _Rows(
            frozenset(self._largest_too_long(prompts)),
            frozenset(self._whole(bucket for bucket in decodes if min(bucket) >= 1)),
        )

    def _largest_too_long(self, prompts: set[Bucket]) -> set[Bucket]:
        """Keeps only the largest context of each query that fills the model's length, because only one is warmed up."""
        cold = list(self._cold_prompts(sorted(prompts)))
        if not cold:
            return prompts
        largest = {query_len: context for _, query_len, context in cold}  # The buckets ascend.
        return {
            (size, query_len, context)
            for size, query_len, context in prompts
            if size > 1
            or query_len not in largest
            or context == largest[query_len]
            or context < blocks_beside(query_len, self.inputs)
        }

    def _cold_prompts(self, table: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yields the buckets of one sequence that are not warmed up. Of others we claim nothing."""
        found = cold_prompts(table, self.version.product, self.version.lookup, self.inputs)
        return (bucket for bucket in found if bucket[0] == 1)

    def _whole(self, decodes: Iterable[Bucket]) -> set[Bucket]:
        """Under contiguous paged attention, keeps only batch sizes with a row for the whole cache.

        There the batch is padded by the number of blocks, and then the blocks by the highest block id. Other batch sizes
        might get the blocks of a larger one's row, which makes a graph that the file does not list.
        """
        rows = set(decodes)
        if not self.inputs.contiguous_pa:
            return rows
        whole = {size for size, _, blocks in rows if blocks >= self.inputs.num_blocks}
        return {bucket for bucket in rows if bucket[0] in whole}

    def read(self, rows: _Rows) -> _Found:
        """Writes rows and reads them back by upstream's rules."""
        for name, found in (("prompt", rows.prompt), ("decode", rows.decode)):
            if not found:
                raise CoverageError(
                    f"{self.version.name}: a bucket file for these limits has no {name} bucket that is kept"
                )
        text = _text(self.server, rows)
        bucketing = self.server.bucketing.model_copy(
            update={"strategy": "file", "file_text": text, "tuned": None}
        )
        spec = self.server.model_copy(update={"bucketing": bucketing})
        inputs = BucketingInputs.from_spec(spec.limits, bucketing)
        strategy = find_strategy(bucketing.version, "file")
        prompt, seeds = strategy.prompt_table(inputs), strategy.decode_seed_table(inputs)
        return _Found(spec, _Rows(frozenset(prompt), frozenset(seeds)), prompt, strategy.decode_table(inputs))

    def closing(self, steps: ReachableSteps, table: BucketTable) -> _Rows:
        """Returns the rows that close the table, as far as the version can express them."""
        added = [addition.entry for addition in close(steps, self.server.bucketing.max_padding, table)]
        prompts = [
            (entry.batch_size, entry.query_len, entry.num_ctx_blocks)
            for entry in added
            if isinstance(entry, PromptEntry)
        ]
        if not keeps_too_long(self.version.product):
            prompts = list(_longest_prompts(steps.prompts, table))
        decodes = [entry for entry in added if isinstance(entry, DecodeEntry)]
        decodes += steps.speculative.closing_entries((*table.decode, *decodes))
        return _Rows(
            frozenset(map(self._readable, prompts)),
            frozenset((entry.batch_size, 1, entry.num_blocks) for entry in decodes),
        )

    def _readable(self, bucket: Bucket) -> Bucket:
        """Returns the next larger bucket that upstream reads as a prompt and keeps despite sliced attention."""
        batch_size, query_len, context = bucket
        longer = (batch_size, max(query_len, 2), context)
        return (batch_size, query_len, 1) if is_off_slice(longer, self.inputs) else longer

    def check(self, found: _Found) -> None:
        """Raises CoverageError unless every step is looked up to a bucket that is warm."""
        coverage = prove_steps(found.steps, found.table)
        if not coverage.is_closed:
            raise CoverageError(self._hole(found, coverage))
        cold = next(self._cold_prompts(found.prompt), None) or next(
            cold_decodes(found.decode, self.version.lookup, self.inputs), None
        )
        if cold is not None:
            raise CoverageError(
                f"{self.version.name}: its warm-up does not compile the bucket {cold}, which some steps need"
                + self._mend()
            )

    def _hole(self, found: _Found, coverage: Coverage) -> str:
        server = coverage_of_server(found.spec)
        fallback = server.fallback if server is not None and not server.coverage.is_closed else None
        file = (
            "any bucket file" if self.server.bucketing.coverage == "closed" else "this table as a bucket file"
        )
        text = f"{self.version.name}: with {file} it has {coverage}"
        if fallback is not None:
            text += f", for which it compiles {fallback} while the request waits"
        return text + self._mend()

    def _mend(self) -> str:
        if self.server.bucketing.coverage == "upstream":
            return ' (coverage = "closed" in the [bucketing] of the spec)'
        if self.server.scheduler.chunked_prefill and not keeps_too_long(self.version.product):
            return " (a server without chunked prefill, or vllm-gaudi from v0.19.1 on)"
        return ""


def _longest_prompts(prompts: ReachablePrompts, table: BucketTable) -> Iterator[Bucket]:
    """Yields the longest query that fits with each whole context of a hole, unless it also fits with a larger context."""
    whole = ReachablePrompts(prompts.limits, "none" if prompts.contexts == "none" else "blocks")
    for hole in prompt_holes(prompts, table):
        for context in range(hole.first_ctx_blocks, min(hole.last_ctx_blocks, whole.max_ctx_blocks) + 1):
            longest = whole.longest_query(context)
            if context == hole.last_ctx_blocks or whole.longest_query(context + 1) < longest:
                yield 1, longest, context


def _server(spec: BuildSpec) -> BuildSpec:
    """Returns the spec with vLLM as its server, because vLLM reads the file."""
    bucketing = spec.bucketing
    if bucketing.strategy == "unified":
        raise SpecError("bucketing.strategy", "is 'unified', which reads no bucket file", "another strategy")
    if bucketing.merged_prefill:
        problem = "is true: upstream then rounds contexts itself and ignores what a bucket file lists"
        raise SpecError("bucketing.merged_prefill", problem, "false")
    if spec.target.execution_mode == "eager":
        raise SpecError("target.execution_mode", "is 'eager': there are no graphs to warm up", "another mode")
    if spec.scheduler.engine == "vllm":
        return spec
    return spec.model_copy(update={"scheduler": SchedulerSpec(engine="vllm")})


def _version(server: BuildSpec) -> GaudiVersion:
    version = find_version(server.bucketing.version)
    if not isinstance(version, GaudiVersion) or not version.environment.has_file:
        raise SpecError(
            "bucketing.version",
            f"is {version.name!r}, which reads no bucket file",
            "vllm-gaudi from v0.11.2 on reads one",
        )
    return version


def _pinned(limits: ServingLimits) -> dict[str, int]:
    return {
        "num-gpu-blocks-override": limits.num_blocks,
        "block-size": limits.block_size,
        "max-model-len": limits.max_model_len,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "max-num-seqs": limits.max_num_seqs,
    }


def _text(server: BuildSpec, rows: _Rows) -> str:
    """Returns the file: comments on its purpose, then its lines. It depends only on rows, limits and version."""
    flags = " ".join(f"--{name} {value}" for name, value in _pinned(server.limits).items())
    what = "(batch sizes, query lengths, context blocks); a query of 1 is a decode"
    heads = (f"# buckets for {server.bucketing.version}: {what}", f"# {flags}")
    lines = (*heads, *bucket_lines(rows.prompt), *bucket_lines(rows.decode))
    return "".join(f"{line}\n" for line in lines)
