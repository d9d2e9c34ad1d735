"""The token counts at which SGLang's kernels for hyper-connections differ: each is asked for once before it is ready.

How many partial sums a kernel has follows from the number of tokens of a step, and each number is a kernel of its own
(`aotgaudi.bucketing.mhc_splits`, with its sources). A manifest has one token count for each: a prompt of just so many
tokens, which shares no beginning with another (the prefix cache would take that from it), makes such a step.
"""

from __future__ import annotations

from aotgaudi.bundle.launch import WarmUpRequest, completion
from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters.base import Flags
from aotgaudi.wrap.adapters.sglang.neutral import CHUNK
from aotgaudi.wrap.adapters.shapes import Shapes, no_shapes
from aotgaudi.wrap.adapters.words import one_integer

_LOW, _SPAN = 10, 240
"""Token ids that every vocabulary has, as in ``guests.exercise``."""
_GENERATED = 1


def shapes_of(spec: BuildSpec, flags: Flags) -> Shapes:
    """Returns what SGLang is asked for the hyper-connections of `spec`, and the flag that bounds a step's tokens.

    Raises SpecError where the spec has none, or the command allows for other steps than the spec.
    """
    manifest = Manifest.of(spec)
    counts = sorted({int(entry.row()[0]) for entry in manifest.of_kind("mhc")})
    if not counts:
        raise no_shapes("sglang with a model without hyper-connections")
    most, room = counts[-1], flags.room.max_model_len
    given = one_integer(flags.values, CHUNK, most)
    if given != most:
        problem = f"is {given}, and the spec's largest step has {most} tokens"
        raise SpecError(f"--{CHUNK}", problem, "one of them changed")
    if room is not None and most + _GENERATED > room:
        problem = f"is {room}: a step of {most} tokens is no single prompt, and so cannot be asked for"
        raise SpecError("--context-length", problem, f"at least {most + _GENERATED}")
    if len(counts) > _SPAN:
        raise SpecError("mhc", f"gives {len(counts)} token counts", f"at most {_SPAN}")
    return Shapes(
        manifest_id=manifest.id,
        files={},
        words=() if CHUNK in flags.values else (f"--{CHUNK}", str(most)),
        variables={},
        paths={},
        requests=tuple(_request(index, num_tokens) for index, num_tokens in enumerate(counts)),
    )


def _request(index: int, num_tokens: int) -> WarmUpRequest:
    """A prompt of so many tokens; the first one, and so every prefix, is no other request's."""
    ids = [_LOW + (index + 7 * place) % _SPAN for place in range(num_tokens)]
    return completion(f"{num_tokens} tokens", prompt=list(ids), max_tokens=_GENERATED)
