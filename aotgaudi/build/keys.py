"""The two levels of keys. Imports no torch.

*Program key* (direct): what a program follows from; answers "is this entry traced?" without torch.
*Unit key* (content): the text of a graph and its target; makes equal graphs one artifact.

A program key takes everything in; what is left out is named here, with the reason.
"""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

import aotgaudi.graphs
from aotgaudi.backends.base import Target
from aotgaudi.digest import Key, canonical_json, sha256_bytes
from aotgaudi.graphs.sampler_signature import signature_of
from aotgaudi.manifest.entries import Entry, SamplerEntry
from aotgaudi.spec.build_spec import BuildSpec

LIMITS_EXCLUDED = {
    "max_num_seqs": "bounds which entries exist, not what one computes",
    "max_num_prefill_seqs": "bounds which entries exist",
    "max_num_batched_tokens": "bounds which entries exist",
    "max_model_len": "bounds which entries exist",
}


def program_key(entry: Entry, spec: BuildSpec, target: Target) -> Key:
    """Returns the key of the program of `entry`.

    Sampler settings are per-row tensors of the graph, so a sampler entry is keyed by its signature.
    """
    limits = spec.limits.model_dump()
    return Key.of(
        [
            ("schema", "aotgaudi.program-key/1"),
            ("entry.kind", entry.kind),
            *_entry_components(entry),
            *((f"model.{name}", value) for name, value in spec.model.signature().components),
            *((f"limits.{n}", str(v)) for n, v in sorted(limits.items()) if n not in LIMITS_EXCLUDED),
            ("toolchain.graphs", graph_code_digest()),
            ("toolchain.transformers", metadata.version("transformers")),
            *target.components(),
        ]
    )


def unit_key(text: str, target: Target) -> Key:
    """Returns the key of the unit with this canonical text."""
    return Key.of(
        [("schema", "aotgaudi.unit-key/1"), ("graph", sha256_bytes(text.encode())), *target.components()]
    )


@functools.cache
def graph_code_digest() -> str:
    """Returns the sha256 of our graph code's source (names and bytes): any edit of it traces anew."""
    folder = Path(aotgaudi.graphs.__path__[0])
    rows = [[path.name, sha256_bytes(path.read_bytes())] for path in sorted(folder.glob("*.py"))]
    return sha256_bytes(canonical_json(rows))


def _entry_components(entry: Entry) -> list[tuple[str, str]]:
    if isinstance(entry, SamplerEntry):
        signature = signature_of([(entry.temperature, entry.top_p, entry.top_k)])
        return [("entry.batch_size", str(entry.batch_size)), ("entry.signature", signature.value)]
    return [(f"entry.{name}", str(value)) for name, value in zip(entry.columns(), entry.row(), strict=True)]
