"""What a trace says of the entries of a manifest: in which its steps run, and which limits most of its requests stay below.

A trace does not say how fast a server is, and so not how many of its requests run together. So it is replayed twice, and
each replay counts for half: in one every request is there from the beginning, and steps are as full as the limits let them
be; in the other each request is alone.
"""

from __future__ import annotations

import math
from collections import defaultdict

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import Entry
from aotgaudi.manifest.importance import Traffic
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace

MOST = 0.9
"""What part of the requests is "most"."""

_MOST_STEPS = 40_000
"""About so many steps are replayed, of requests that are spread evenly over the trace: some seconds."""


def traffic_of(manifest: Manifest, trace: Trace) -> Traffic:
    """Returns how often the steps of a trace run in each entry, and limits that nine of ten of its requests fit.

    Raises:
        SpecError: None of its requests fits the limits of the manifest.
        UncoveredStepError: The manifest has a hole, which a step met.
    """
    limits, table = manifest.spec.limits, BucketTable.from_entries(manifest.entries)
    steps: defaultdict[Entry, float] = defaultdict(float)
    for num_together in (limits.max_num_seqs, 1):
        some = _some(trace, num_together)
        since = 0.0 if num_together > 1 else float(limits.max_model_len * 2)
        arrivals = tuple(since * number for number in range(len(some)))
        spread = Trace(arrivals, some.prompt_tokens, some.generated_tokens)
        found = replay(spread, limits, table, lambda _: 1.0, manifest.spec.scheduler.policy)
        for (_, entry), count in found.steps.items():
            steps[entry] += count / found.num_steps
    length = min(limits.max_model_len, max(2, _most_of(trace)))
    return Traffic(steps, limits.model_copy(update={"max_model_len": length}))


def _some(trace: Trace, num_together: int) -> Trace:
    """As many of its requests as give about `_MOST_STEPS` steps when so many of them run together."""
    num_steps = len(trace) + sum(trace.generated_tokens) / num_together
    every = max(1, math.ceil(num_steps / _MOST_STEPS))
    return Trace(trace.arrivals[::every], trace.prompt_tokens[::every], trace.generated_tokens[::every])


def _most_of(trace: Trace) -> int:
    """How many tokens most of the requests have at most, prompt and answer together."""
    lengths = sorted(map(sum, zip(trace.prompt_tokens, trace.generated_tokens, strict=True)))
    return lengths[math.ceil(MOST * len(lengths)) - 1]
