"""Decides which of inductor's loops the threads share. Offline only.

Matrix products and attention are our templates; inductor writes the loops between them. For a prompt's rows these loops are
a seventh of a step on two threads if one thread waits (docs/adr/0005-cpu-kernels.md). In a decode step they take less time
than sharing costs. By default inductor shares by the number of threads of the building machine, or shares every loop.

Results do not depend on the thread that computes them: no sum is shared, and units that add to stored values share nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.codegen.cpp import CppKernel, ParallelDepth

_ADDING = ("index_add", "scatter_add", "scatter_reduce")


@contextlib.contextmanager
def shared_loops(graph: fx.Graph) -> Iterator[None]:
    """While active, inductor shares the loops of `graph` over at least `cpp.threads` x `cpp.min_chunk_size` numbers.

    The number of threads is decided when a unit runs: `cpp.dynamic_threads` must be on.
    """
    adds = any(map(_adds, graph.nodes))
    decide = CppKernel.decide_parallel_depth

    def decide_ours(kernel: CppKernel, deepest: ParallelDepth, threads: int) -> ParallelDepth:
        if adds or deepest.start_depth > 0 or kernel.reduction_depth == 0:
            return ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
        # With dynamic threads on, inductor would share the smallest loops, too.
        with config.patch({"cpp.dynamic_threads": False}):
            decided: ParallelDepth = decide(kernel, deepest, threads)
        return decided

    CppKernel.decide_parallel_depth = decide_ours  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppKernel.decide_parallel_depth = decide  # type: ignore[method-assign]


def _adds(node: fx.Node) -> bool:
    """Whether a node adds to stored values, in an order that threads would not keep."""
    name: str = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").removesuffix("_")
    if name == "index_put":
        accumulate: Any = node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False)
        return bool(accumulate)
    return name in _ADDING
