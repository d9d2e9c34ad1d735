"""vLLM's own counters, by its names (vllm/compilation/counter.py)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class CompilationCounter:
    num_models_seen: int = 0
    num_graphs_seen: int = 0
    num_backend_compilations: int = 0
    num_inductor_compiles: int = 0
    num_eager_compiles: int = 0
    num_cache_entries_updated: int = 0
    num_compiled_artifacts_saved: int = 0
    num_compiled_artifacts_loaded: int = 0
    num_aot_compiles: int = 0
    num_aot_artifacts_saved: int = 0
    num_aot_artifacts_loaded: int = 0


compilation_counter = CompilationCounter()
