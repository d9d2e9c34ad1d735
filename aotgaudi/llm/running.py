"""What a running model is told, what it consists of, and how warm it is. Plain values; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotgaudi.errors import SpecError
from aotgaudi.llm.model_files import GenerationConfig
from aotgaudi.phases import Phases

if TYPE_CHECKING:  # The front of a server knows these values, and nothing of what they are made with.
    from aotgaudi.bundle.model_directory import ModelDirectory
    from aotgaudi.bundle.part import Outside
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.engine.core import OnStep
    from aotgaudi.engine.loop import Engine
    from aotgaudi.llm.tokenizer import Tokenizer
    from aotgaudi.runtime.guard import Cause, Guard, Layer
    from aotgaudi.runtime.shards import WeightsMemory
    from aotgaudi.spec.limits import ServingLimits
    from aotgaudi.spec.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What to run, and on which conditions. May be sent to another process.

    Attributes:
        bundle: The sealed bundle.
        acceptance: Whose bundles may be used.
        model_dir: Directory with config.json, weights and tokenizer.
        require_warm: Refuse to start unless every entry is warm; refuse to compile.
        num_threads: Threads of matrix products.
        allow_unbound_model: Where a signature is demanded, take one that does not cover the model directory.
        weights_memory: "copy": weights are read into memory of our own; "map": mapped from files that must never change.
        generation_config: Where sampling defaults come from.
        store_root: Where a builder started on first use keeps what it builds; used only without `require_warm`.
        environment: What that builder inherits; None: this process's environment.
        policy: How prompts and decodes take turns; None: as the spec of the bundle says.
        prefix_caching: Whether prompts start after what is cached of them; None: as the spec of the bundle says.
        outside: What becomes of what the warm entries do not cover. None: "refuse" under `require_warm`, else "first-use",
            which goes with no other.
    """

    bundle: Path
    acceptance: TrustPolicy
    model_dir: Path
    require_warm: bool
    num_threads: int
    store_root: Path
    allow_unbound_model: bool = False
    weights_memory: WeightsMemory = "copy"
    generation_config: GenerationConfig = GenerationConfig()  # noqa: RUF009 - a frozen value
    environment: Mapping[str, str] | None = None
    prefix_caching: bool | None = None
    policy: Policy | None = None
    outside: Outside | None = None

    def __post_init__(self) -> None:
        """Refuses to map files that were signed: they could change after they were verified."""
        if self.acceptance.signatures is not None and self.weights_memory == "map":
            raise SpecError(
                "--weights-memory map",
                "maps weights that may change after their signature was verified",
                "leave it out, or leave out --trusted-key",
            )

    @property
    def outside_policy(self) -> Outside:
        """What becomes of what the warm entries do not cover."""
        return self.outside or ("refuse" if self.require_warm else "first-use")


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who follows a start, and the steps after it.

    Attributes:
        on_model: Is told the model directory once it is known what must be in it, before anything is loaded.
        on_step: Observes the time of each step, on the engine's thread.
        phases: Times the start.
    """

    on_model: Callable[[ModelDirectory], None] | None = None
    on_step: OnStep | None = None
    phases: Phases = field(default_factory=Phases)


@dataclass(frozen=True)
class Warmth:
    """How warm a running model is, and what keeps it from compiling.

    `num_not_warmed` counts steps whose entry was not loaded when it was needed; `compilations` counts by cause, see
    `aotgaudi.runtime.guard.CAUSES`. `layers` are those of the guard, from below; none before it is armed.
    `num_samplers_used` counts the sampler entries that steps have asked for.
    """

    num_warm: int
    num_total: int
    num_not_warmed: int
    compilations: Mapping[Cause, int]
    layers: tuple[Layer, ...] = ()
    num_samplers_used: int = 0

    def beside(self, guard: Guard) -> Warmth:
        """Returns the same with what `guard` counts, that of another process of the server."""
        counts = guard.compilations()
        return replace(
            self, compilations={cause: num + counts[cause] for cause, num in self.compilations.items()}
        )


@dataclass(frozen=True, kw_only=True)
class RunningModel:
    """A model that can be asked, and what is known of it.

    `defaults` are the sampling parameters of requests that do not state them, by the names of `SamplingParams`. `binding`
    says whether the bundle binds the model directory, e.g. "bound (6 files)", `coverage` whether every step that can be
    formed has an entry. `limits` are those that it is served under; `outside` says why they are lower than the manifest's,
    and is empty where they are not.
    """

    engine: Engine
    tokenizer: Tokenizer
    directory: ModelDirectory
    defaults: Mapping[str, Any]
    manifest_id: str
    binding: str
    coverage: str
    limits: ServingLimits
    guard: Guard
    warmth: Callable[[], Warmth]
    outside: str = ""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.limits.max_model_len
