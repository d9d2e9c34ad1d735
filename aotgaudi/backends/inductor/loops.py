"""Which of the loops that inductor writes threads share. Offline only.

Matrix products and attention are templates of ours; inductor writes what is between them. Over a prompt's rows that is a
seventh of a step of two threads, while one of them waits (docs/adr/0065-shared-loops.md); in a decode step it is less than
sharing costs. Left to itself, inductor shares either by the number of threads of the machine that builds, or every loop.

What a number is does not depend on who computes it: no sum is shared, and a unit that adds to what is stored shares nothing.
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

    By how many threads is known when a unit runs: `cpp.dynamic_threads` must be on.
    """
    adds = any(map(_adds, graph.nodes))
    decide = CppKernel.decide_parallel_depth

    def decide_ours(kernel: CppKernel, deepest: ParallelDepth, threads: int) -> ParallelDepth:
        if adds or deepest.start_depth > 0 or kernel.reduction_depth == 0:
            return ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
        # With dynamic threads alone, loops are shared however small they are.
        with config.patch({"cpp.dynamic_threads": False}):
            decided: ParallelDepth = decide(kernel, deepest, threads)
        return decided

    CppKernel.decide_parallel_depth = decide_ours  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppKernel.decide_parallel_depth = decide  # type: ignore[method-assign]


def _adds(node: fx.Node) -> bool:
    """Whether a node adds to what is stored, in an order that threads would not keep."""
    name: str = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").removesuffix("_")
    if name == "index_put":
        accumulate: Any = node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False)
        return bool(accumulate)
    return name in _ADDING
