"""Options of the backend: their defaults, and what ``options={...}`` may change for one call."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault

use_eager_fallback = flags.is_on("PT_HPU_USE_EAGER_FALLBACK", otherwise=True)
keep_input_mutations = flags.is_on("PT_HPU_KEEP_INPUT_MUTATIONS")
use_inplace_index_copy = flags.is_on("PT_HPU_USE_INPLACE_INDEX_COPY", otherwise=True)
use_graph_freezing = flags.is_on("PT_HPU_COMPILE_GRAPH_FREEZE")
force_static_compile = flags.is_on("PT_HPU_FORCE_STATIC_COMPILE")

NAMES = (
    "use_eager_fallback",
    "keep_input_mutations",
    "use_inplace_index_copy",
    "use_graph_freezing",
    "force_static_compile",
)


@contextmanager
def patched(options: Mapping[str, object]) -> Iterator[None]:
    """Changes options. Raises AttributeError for a name that is none."""
    unknown = sorted(set(options) - set(NAMES))
    if "use_graph_freezing" in options and has_fault("no-option"):
        unknown = ["use_graph_freezing"]
    if unknown:
        raise AttributeError(f"config has no option {unknown[0]!r}")
    before = {name: globals()[name] for name in options}
    globals().update(options)
    try:
        yield
    finally:
        globals().update(before)
