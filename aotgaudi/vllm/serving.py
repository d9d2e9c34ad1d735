"""The rest of an environment that decides what is warm: execution mode, defragmenter, memory, vision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.bucketing.versions import find_version
from aotgaudi.errors import SpecError
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.target import ExecutionMode
from aotgaudi.vllm.environment import BucketingEnvironment
from aotgaudi.vllm.ignored import DEFRAG_VARIABLES
from aotgaudi.vllm.reader import VariableReader
from aotgaudi.vllm.values import parse_fraction, parse_integer, shown

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"
RESERVED_VARIABLE = "VLLM_GRAPH_RESERVED_MEM"
DEFAULT_RESERVED = 0.1
"""Share of usable memory that is kept for graphs (vllm_gaudi/v1/worker/hpu_worker.py 407)."""

MODES: Mapping[tuple[bool, bool], ExecutionMode] = {
    (True, False): "hpu_graphs",
    (True, True): "lazy",
    (False, False): "torch_compile",
    (False, True): "eager",
}
"""The execution mode by ``(PT_HPU_LAZY_MODE is 1, --enforce-eager)``."""

MODE_NOTES: Mapping[ExecutionMode, str] = {
    "hpu_graphs": "hpu_graphs: every shape's recipes and captured graph must be warm; captures are made anew by"
    " every process",
    "lazy": "lazy: every shape's recipes must be warm; upstream warms up nothing with --enforce-eager, and"
    " compiles on first use",
    "torch_compile": "torch_compile: every shape's recipes and compiled code must be warm; tracing is repeated by"
    " every process",
    "eager": "eager: nothing is compiled by shape, so that nothing must be warm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEnvironment:
    """What an environment says besides buckets.

    Attributes:
        is_lazy: PT_HPU_LAZY_MODE; None where it is unset.
        skips_warmup: VLLM_SKIP_WARMUP.
        reserved: VLLM_GRAPH_RESERVED_MEM; None where it is unset.
        vision_buckets, vision_resolutions: as ``spec.vision.VisionSpec`` has them; buckets ``None`` in the
            variable stands for an empty tuple, unset for None.
        heeded: the variables that were read.
        notes: as of ``BucketingEnvironment``.
    """

    is_lazy: bool | None
    skips_warmup: bool
    defrag: bool | None
    defrag_threshold: int | None
    defrag_with_graphs: bool | None
    reserved: float | None
    vision_buckets: tuple[int, ...] | None
    vision_resolutions: tuple[str, ...]
    heeded: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, environment: Mapping[str, str], version: str) -> ServingEnvironment:
        """Reads the environment as `version` does. Raises SpecError, with the variable named."""
        reader = VariableReader(environment)
        reserved = reader.text(RESERVED_VARIABLE)
        defrag = _Defrag.read(reader, find_version(version).environment)
        return cls(
            is_lazy=_lazy(reader),
            skips_warmup=bool(reader.boolean("VLLM_SKIP_WARMUP")),
            defrag=defrag.enabled,
            defrag_threshold=defrag.threshold,
            defrag_with_graphs=defrag.with_graphs,
            reserved=None
            if reserved is None
            else parse_fraction(RESERVED_VARIABLE, reserved, includes_zero=True, includes_one=False),
            vision_buckets=_vision_buckets(reader),
            vision_resolutions=_resolutions(reader),
            heeded=reader.heeded,
            notes=reader.notes,
        )

    def defrag_spec(self, bucketing: BucketingEnvironment, *, is_lazy: bool) -> DefragSpec:
        """Returns the defragmenter of this environment.

        Where VLLM_DEFRAG is unset it is on with unified attention (v0.11.2 to v0.17.1) or with contiguous paged
        attention (from v0.19.0 on; extension/features.py), and its swaps are graphs under torch.compile
        (extension/defragmentation.py 61).
        """
        by_default = {"contiguous_pa": bucketing.contiguous_pa, "unified": bucketing.unified}
        rule = find_version(bucketing.version).environment.defrag
        enabled = by_default.get(rule or "", False) if self.defrag is None else self.defrag
        with_graphs = not is_lazy if self.defrag_with_graphs is None else self.defrag_with_graphs
        spec = DefragSpec(enabled=enabled, with_graphs=with_graphs)
        threshold = {} if self.defrag_threshold is None else {"threshold": self.defrag_threshold}
        return spec.model_copy(update=threshold)


@dataclass(frozen=True, slots=True)
class _Defrag:
    enabled: bool | None
    threshold: int | None
    with_graphs: bool | None

    @classmethod
    def read(cls, reader: VariableReader, rules: EnvironmentRules) -> _Defrag:
        if rules.defrag is None:
            return cls(False, None, None)
        enabled, threshold, with_graphs = DEFRAG_VARIABLES
        return cls(reader.boolean(enabled), reader.integer(threshold, 1, None), reader.boolean(with_graphs))


def _lazy(reader: VariableReader) -> bool | None:
    text = reader.text(LAZY_VARIABLE)
    if text is None:
        return None
    if text.strip() not in ("0", "1"):
        raise SpecError(
            LAZY_VARIABLE, f"is {shown(text)}", "0 or 1 (the bridge takes all but 0 for lazy, false included)"
        )
    return text.strip() == "1"


def _vision_buckets(reader: VariableReader) -> tuple[int, ...] | None:
    name = "VLLM_MULTIMODAL_BUCKETS"
    text = reader.text(name)
    if not text:
        return None
    if text == "None":
        return ()
    return tuple(parse_integer(name, item, minimum=1) for item in text.split(","))


def _resolutions(reader: VariableReader) -> tuple[str, ...]:
    text = reader.text("VLLM_MULTIMODAL_RESOLUTIONS") or ""
    return tuple(item.strip() for item in text.split(",") if item.strip())
