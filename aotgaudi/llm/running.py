"""Values from which a model is started, and that describe it: options, inputs, parts, how warm it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotgaudi.llm.model_files import GenerationConfig
from aotgaudi.phases import Phases

if TYPE_CHECKING:  # The API server needs some of these values, but not the modules that make them.
    from concurrent.futures import Future

    from aotgaudi.bundle.bundle import Bundle
    from aotgaudi.bundle.model_directory import ModelDirectory
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.bundle.verify import VerifiedBundle
    from aotgaudi.engine.admission import RequestRules
    from aotgaudi.engine.core import OnStep
    from aotgaudi.engine.loop import Engine
    from aotgaudi.llm.tokenizer import Tokenizer
    from aotgaudi.manifest.manifest import Manifest
    from aotgaudi.runtime.guard import Cause, Guard, Layer
    from aotgaudi.runtime.weights import ShardReader
    from aotgaudi.spec.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What to run, and under which conditions. Instances can be sent to another process.

    Attributes:
        bundle: The sealed bundle.
        acceptance: Which bundles may be used.
        model_dir: Directory with config.json, weights and tokenizer.
        require_warm: Hash every object of the bundle, demand that every possible step has an entry, and arm the guard.
        num_threads: Threads of matrix products.
        allow_unbound_model: If a signature is required, accept one that does not cover the model directory.
        generation_config: Where sampling defaults come from.
        policy: How prompts and decodes take turns. None takes the setting of the bundle's spec.
        prefix_caching: Whether prompts start after their cached prefix. None takes the setting of the bundle's spec.
        kv_cache_bytes: What the KV cache may take. None takes the number of blocks of the bundle's spec.
    """

    bundle: Path
    acceptance: TrustPolicy
    model_dir: Path
    require_warm: bool
    num_threads: int
    allow_unbound_model: bool = False
    generation_config: GenerationConfig = GenerationConfig()  # noqa: RUF009 - a frozen value
    prefix_caching: bool | None = None
    policy: Policy | None = None
    kv_cache_bytes: int | None = None

    @property
    def hashes(self) -> bool:
        """Whether every object of the bundle is hashed. A signature would mean nothing otherwise."""
        return self.require_warm or bool(self.acceptance.keys)


@dataclass(frozen=True)
class VerifiedInputs:
    """A bundle, the weights of its model, and futures of their loading. If `verified` fails, the other futures fail too.

    `manifest` is the bundle's, with the number of KV blocks that is served. `caches` has memory for the KV caches, by name.
    """

    bundle: Bundle
    manifest: Manifest
    weights: ShardReader
    verified: Future[VerifiedBundle]
    prefetched: Future[None]
    caches: Future[Mapping[str, memoryview]]


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Observers of a start and of the steps after it.

    Attributes:
        on_model: Is called with the model directory once its expected files are known, before anything is loaded.
        on_step: Is called with the time of each step, on the engine's thread.
        phases: Times the start.
    """

    on_model: Callable[[ModelDirectory], None] | None = None
    on_step: OnStep | None = None
    phases: Phases = field(default_factory=Phases)


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """Steps of one class of hyper-connections and their tokens, padding included. `is_warm` if the class was prewarmed."""

    n_splits: int
    num_steps: int
    num_tokens: int
    is_warm: bool


@dataclass(frozen=True)
class Warmth:
    """How warm a running model is, and what guards it against compiling.

    `compilations` counts by cause, see `aotgaudi.runtime.guard.CAUSES`. `layers` are the guard's, from the lowest, and empty
    unless it is armed. `splits` has the classes of hyper-connections, and is empty for a model without them.
    """

    num_warm: int
    num_total: int
    compilations: Mapping[Cause, int]
    layers: tuple[Layer, ...] = ()
    splits: tuple[SplitCounts, ...] = ()

    @property
    def num_cold_splits(self) -> int:
        """How many steps had a class of hyper-connections that was not prewarmed."""
        return sum(counts.num_steps for counts in self.splits if not counts.is_warm)

    def plus(self, guard: Guard) -> Warmth:
        """Returns a copy that adds the counts of `guard`, which belongs to another process of the server."""
        counts = guard.compilations()
        return replace(
            self, compilations={cause: num + counts[cause] for cause, num in self.compilations.items()}
        )


@dataclass(frozen=True, kw_only=True)
class RunningModel:
    """A model that serves requests.

    `defaults` has the default sampling parameters by their names in `SamplingParams`. `binding` says whether the bundle is
        bound to the model directory, e.g. "bound (6 files)". `rules` are the conditions that
        requests must meet before they are added to `engine`.
    """

    engine: Engine
    tokenizer: Tokenizer
    directory: ModelDirectory
    defaults: Mapping[str, Any]
    manifest_id: str
    binding: str
    rules: RequestRules
    guard: Guard
    warmth: Callable[[], Warmth]

    @property
    def max_model_len(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self.rules.limits.max_model_len
