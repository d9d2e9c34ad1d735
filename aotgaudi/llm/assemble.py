"""Assembles a running model (programs, engine, tokenizer) from a bundle that is being verified.

Importing this module imports torch, which takes as long as hashing the bundle. `start` does both at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from aotgaudi.backends.base import Runtime
from aotgaudi.backends.online import make_runtime
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.model_directory import ModelDirectory, check_model
from aotgaudi.engine.admission import RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.constraints import ConstraintMaker, Grammars
from aotgaudi.engine.core import EngineCore, OnStep
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.entries import DecodeEntry, Entry, MhcEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.llm.grammar_compiler import LaterGrammars
from aotgaudi.llm.model_files import GenerationConfig, split_by_sampler
from aotgaudi.llm.running import ModelOptions, Observers, RunningModel, SplitCounts, VerifiedInputs, Warmth
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.manifest.enumerate import MHC_SUBLAYERS
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import described_cache, kv_cache_bytes
from aotgaudi.phases import Phases
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.runtime.guard import Guard
from aotgaudi.runtime.load import Artifacts, Loader
from aotgaudi.runtime.memory import keep_freed_memory
from aotgaudi.spec.policy import Policy
from aotgaudi.spec.sampler import SamplerSpec

logger = logging.getLogger(__name__)


def assemble(options: ModelOptions, observers: Observers, inputs: VerifiedInputs) -> RunningModel:
    """Returns a model whose engine runs. Raises what `aotgaudi.llm.start.start` does."""
    keep_freed_memory()
    with _one_thread():
        return _assembled(options, observers, inputs)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread while this thread loads, since another thread computes later (see ProgramRunner)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _assembled(options: ModelOptions, observers: Observers, inputs: VerifiedInputs) -> RunningModel:
    manifest, model = inputs.manifest, inputs.weights.model
    spec = manifest.spec
    with observers.phases.time("tokenizer"):
        check_model(spec, model)
        tokenizer = Tokenizer.load(model)
        defaults = sampling_defaults(options.generation_config, model, spec.sampler)
        grammars = None
        if spec.sampler.signature.constraints:
            grammars = LaterGrammars(model, tokenizer, spec.model.vocab_size)

    executables = ExecutableTable()
    runtime = _load(observers.phases, inputs, executables)
    splits = _prewarmed(manifest, executables, observers.phases)
    guard = Guard()  # Counts from here on: nobody may arm it.
    guard.watch("backend", runtime.num_compiled)
    runner = ProgramRunner(executables, spec.limits.block_size, options.num_threads)
    with observers.phases.time("engine"):
        engine = make_engine(
            manifest,
            runner,
            tokenizer,
            on_step=_telling_of_compilations(observers.on_step, guard),
            prefix_caching=caches_prefixes(manifest, options.prefix_caching),
            policy=options.policy,
            grammars=grammars,
        )
        engine.start()
    with contextlib.suppress(SpecError):  # A config may lack a size.
        logger.info("KV cache: %s", described_cache(spec.limits, kv_cache_bytes(spec)))
    logger.info(
        "%d of %d entries warm, manifest %s, model: %s",
        len(executables),
        len(manifest.entries),
        inputs.bundle.manifest.id[:16],
        model.describe(),
    )

    def warmth() -> Warmth:
        steps = {entry: counters.steps.num for entry, counters in engine.stats().counters.entries.items()}
        return Warmth(
            len(executables),
            len(manifest.entries),
            guard.compilations(),
            guard.layers,
            splits.counts(steps),
        )

    return RunningModel(
        engine=engine,
        tokenizer=tokenizer,
        directory=model,
        defaults=defaults,
        manifest_id=inputs.bundle.manifest.id,
        binding=model.describe(),
        rules=RequestRules(spec.limits, spec.model.vocab_size, spec.sampler, executables.has_heads),
        guard=guard,
        warmth=warmth,
    )


def _load(phases: Phases, inputs: VerifiedInputs, executables: ExecutableTable) -> Runtime:
    """Loads every entry into `executables`, and returns what runs them."""
    bundle, verified = inputs.bundle, inputs.verified.result()
    entries, receipt = inputs.manifest.entries, bundle.require_programs()
    executables.declare_samplers(entries)
    runtime = make_runtime(receipt.target)
    inputs.prefetched.result()
    limits = inputs.manifest.spec.limits
    loader = Loader(runtime, inputs.weights, limits.num_blocks, inputs.caches.result())
    artifacts = Artifacts(receipt, verified.program, verified.read, verified.path)
    loader.load(entries, artifacts, executables, phases)
    verified.objects.close()
    with phases.time("rehearsal"):
        loader.rehearse(executables, limits.block_size)
    return runtime


def _prewarmed(manifest: Manifest, executables: ExecutableTable, phases: Phases) -> SplitCounter:
    """Prewarms hyper-connections, and returns the counter of steps by class."""
    splits = StepSplits.of(manifest.spec)
    with contextlib.nullcontext() if splits is None else phases.time("prewarm"):
        warm = prewarm(manifest.entries, executables.get)
    return SplitCounter(splits, manifest.entries, warm)


def prewarm(entries: Iterable[Entry], program: Callable[[Entry], BoundProgram | None]) -> frozenset[int]:
    """Runs the program of each ``mhc`` entry once, largest first, and returns the classes that are warm for all sublayers.

    A step's token count decides its class (`aotgaudi.bucketing.mhc_splits`), and its program calls the unit of that class.
    So the first step of a class finds the unit's pages and code in memory, as later steps do. SGLang's log has the same
    lines. `program` returns None for an entry that is not warm.
    """
    found = sorted(
        (entry for entry in entries if isinstance(entry, MhcEntry)), key=lambda entry: -entry.num_tokens
    )
    if not found:
        return frozenset()
    sizes = tuple(dict.fromkeys(entry.num_tokens for entry in found))
    logger.info("MHC prewarm max_num_tokens=%d representative token counts: %s", sizes[0], sizes)
    warm: dict[str, set[int]] = {sublayer: set() for sublayer in MHC_SUBLAYERS}
    for entry in found:
        bound = program(entry)
        if bound is None:
            continue
        begin = perf_counter()
        bound.run_on_zeros()
        seconds = perf_counter() - begin
        logger.info(
            "MHC prewarm path=%s num_tokens=%d completed in %.3fs", entry.sublayer, entry.num_tokens, seconds
        )
        warm[entry.sublayer].add(entry.n_splits)
    return frozenset(set.intersection(*warm.values()))


class SplitCounter:
    """Counts steps and tokens by class, from how often each entry ran. Any thread may use it."""

    def __init__(self, splits: StepSplits | None, entries: Iterable[Entry], warm: frozenset[int]) -> None:
        """`entries` are the entries that may run, `warm` the classes that were prewarmed."""
        self._warm = warm
        self._classes: dict[Entry, int] = {}
        self._tokens: dict[Entry, int] = {}
        for entry in entries:
            if splits is not None and isinstance(entry, (PromptEntry, DecodeEntry)):
                self._classes[entry] = splits.of_entry(entry)
                self._tokens[entry] = entry.num_tokens

    def counts(self, num_steps: Mapping[Entry, int]) -> tuple[SplitCounts, ...]:
        """Returns the counts of each class, in ascending order, if each entry ran `num_steps` times."""
        steps, tokens = (dict.fromkeys(sorted(set(self._classes.values())), 0) for _ in range(2))
        for entry, n_splits in self._classes.items():
            steps[n_splits] += num_steps.get(entry, 0)
            tokens[n_splits] += num_steps.get(entry, 0) * self._tokens[entry]
        return tuple(SplitCounts(n, steps[n], tokens[n], n in self._warm) for n in steps)


def _telling_of_compilations(on_step: OnStep | None, guard: Guard) -> OnStep:
    """Returns an observer that logs steps in which the device compiled graphs, as vLLM for Gaudi does."""
    num_told = 0

    def observe(entry: Entry, seconds: float, num_rows: int) -> None:
        nonlocal num_told
        num = guard.num_by_device()
        if num > num_told:
            logger.warning("Configuration: %s was not warmed-up! %d graphs compiled", entry, num - num_told)
            num_told = num
        if on_step is not None:
            on_step(entry, seconds, num_rows)

    return observe


def make_engine(
    manifest: Manifest,
    runner: ProgramRunner,
    tokenizer: Tokenizer,
    *,
    on_step: OnStep | None = None,
    prefix_caching: bool = False,
    policy: Policy | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    """Returns the engine of a manifest, which is not started yet.

    `policy` None takes the spec's. `grammars` is None if the sampler has no constraints.
    """
    spec = manifest.spec
    scheduler = Scheduler(
        spec.limits,
        BucketTable.from_entries(manifest.entries),
        BlockPool(spec.limits.num_blocks),
        eos_token_ids=tokenizer.eos_token_ids,
        prefix_caching=prefix_caching,
        policy=policy or spec.scheduler.policy,
        is_contiguous=spec.reads_contiguous_blocks,
    )
    constraints = None
    if grammars is not None:
        constraints = ConstraintMaker(
            spec.model.vocab_size,
            tokenizer.eos_token_ids,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            grammars,
        )
    return Engine(
        EngineCore(scheduler, runner, defrag=spec.defrag, on_step=on_step),
        lambda new: IncrementalDetokenizer(
            tokenizer.decode if new.params.skip_special_tokens else tokenizer.decode_all,
            new.prompt_token_ids,
        ),
        constraints=constraints,
    )


def caches_prefixes(manifest: Manifest, asked: bool | None) -> bool:
    """Returns whether prefixes are cached, which `asked` decides, or else the spec. Never if no prompt entry has a context.

    Logs the reason if prefixes are not cached.
    """
    if not (manifest.spec.bucketing.prefix_caching if asked is None else asked):
        logger.info("prefix caching is off: %s", "the spec says so" if asked is None else "as asked")
        return False
    if manifest.spec.reads_contiguous_blocks:
        logger.warning(
            "prefix caching is off: the spec has contiguous_pa, where each block is read for one request"
        )
        return False
    if any(entry.num_ctx_blocks for entry in BucketTable.from_entries(manifest.entries).prompt):
        return True
    logger.warning("prefix caching is off: no prompt entry of the manifest has a context")
    return False


def sampling_defaults(
    config: GenerationConfig, model: ModelDirectory, sampler: SamplerSpec
) -> Mapping[str, Any]:
    """Returns the sampling defaults that the bundle's sampler supports, and logs a warning about the others.

    Raises:
        SpecError: a default is out of range, or its file cannot be read.
    """
    stated = config.defaults(model)
    able, unable = split_by_sampler(stated, sampler)
    if able:
        logger.info("sampling defaults of the model: %s", _listed(able))
    if unable:
        logger.warning(
            "sampling defaults of the model left out, because the bundle's sampler was built without them "
            "(sampler.settings of its spec): %s",
            _listed({name: stated[name] for name in unable}),
        )
    return able


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
