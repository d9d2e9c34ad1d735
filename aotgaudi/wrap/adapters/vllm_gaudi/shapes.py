"""A spec's closed table for vllm-gaudi: the bucket file, and the flags and variables under which it was proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from aotgaudi.bucketing.bucket_file import FILE_VARIABLE
from aotgaudi.errors import SpecError
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters.base import Flags
from aotgaudi.wrap.adapters.shapes import Shapes
from aotgaudi.wrap.adapters.vllm_gaudi.variables import FILE
from aotgaudi.wrap.vllm.values import parse_tokens

_FALSE = frozenset({"", "0", "false", "f", "no", "n", "off"})


def shapes_of(spec: BuildSpec, flags: Flags, environ: Mapping[str, str]) -> Shapes:
    """Returns what a vllm-gaudi server is given so that it warms up the closed table of `spec`, and nothing else.

    What the command and the environment leave open is added; what they say otherwise is refused, for the proof is of the
    spec's limits.

    Raises:
        SpecError: the command or the environment is not that of the spec, or such a server reads no bucket file.
        CoverageError: the server would make buckets, and compile them, on live traffic; names the smallest step.
    """
    found = bucket_file_of(spec)
    _require_single_prompts(spec)
    _require_unset(found, environ)
    given = flags.values
    wanted: dict[str, JsonValue] = {**found.pinned, **found.switches}
    for name, value in wanted.items():
        if name in given:
            _require_same(name, given[name], value)
    variables = {name: value for name, value in found.variables(FILE).items() if name != FILE_VARIABLE}
    for name, value in variables.items():
        if name in environ and environ[name].strip().lower() != value:
            raise SpecError(name, f"is {environ[name]!r}, and the spec says {value!r}", "one of them changed")
    return Shapes(
        manifest_id=Manifest.of(found.spec).id,
        files={FILE: found.text},
        words=tuple(word for name in wanted if name not in given for word in _words(name, wanted[name])),
        variables={name: value for name, value in variables.items() if name not in environ},
        paths={FILE_VARIABLE: FILE},
    )


def _require_single_prompts(spec: BuildSpec) -> None:
    most = spec.limits.max_num_prefill_seqs
    if most > 1:
        raise SpecError(
            "limits.max_num_prefill_seqs",
            f"is {most}: for steps of several prompts the server may add buckets, and compile them, on live traffic",
            "1, and VLLM_PROMPT_BS_BUCKET_MAX unset",
        )


def _require_unset(found: BucketFile, environ: Mapping[str, str]) -> None:
    if environ.get(FILE_VARIABLE):
        raise SpecError(FILE_VARIABLE, "is set", "leave it out: --shapes writes the file")
    for name in found.unset:
        value = environ.get(name, "").strip().lower()
        if name in environ and (value in _FALSE) == (name == "VLLM_ENABLE_BUCKETING"):
            raise SpecError(
                name, f"is {environ[name]!r}", "leave it unset: the buckets are warmed up otherwise"
            )
    if environ.get("VLLM_PROMPT_BS_BUCKET_MAX", "1").strip() not in ("", "1"):
        raise SpecError("VLLM_PROMPT_BS_BUCKET_MAX", f"is {environ['VLLM_PROMPT_BS_BUCKET_MAX']!r}", "1")


def _require_same(name: str, given: JsonValue, wanted: JsonValue) -> None:
    if isinstance(wanted, bool):
        same = given is wanted
    else:
        same = isinstance(given, str) and parse_tokens(f"--{name}", given) == wanted
    if not same:
        raise SpecError(
            f"--{name}", f"is {given}, and the spec says {wanted}", "a spec of this command (--from-vllm)"
        )


def _words(name: str, value: JsonValue) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    else:
        yield from (f"--{name}", str(value))
