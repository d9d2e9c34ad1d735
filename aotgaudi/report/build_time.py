"""Where the time of a build went, for a report: what ``aotgaudi build --json``, or ``build cache --json``, printed of it.

Neither a bundle nor the records of a store hold the times of a build; what a build printed does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from aotgaudi.document import Value, first_problem, load_foreign_object
from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.values import BuildPhase, BuildTime

_MAX_BYTES = 64 << 20
_WANTED = "what `aotgaudi build SPEC --json`, or `build cache`, printed"
_WORK = {"trace": "tracing", "compile": "compiling"}

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}\z")]
Count = Annotated[int, Field(ge=0, le=10**9)]


class _Told(Value):
    """Only what is looked at; the rest is of no concern here."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Phase(_Told):
    phase: Word
    begin: Seconds
    end: Seconds


class _Outcome(_Told):
    num_traced: Count
    num_compiled: Count
    seconds: Seconds
    num_workers: Count
    worker_seconds: dict[Word, Seconds]


class _Phases(_Told):
    phases: Annotated[tuple[_Phase, ...], Field(max_length=100)]


def read_build_time(path: Path, manifest: Manifest) -> BuildTime:
    """Returns where the time of the build went of which `path` tells.

    Raises:
        SpecError: it cannot be read, does not tell of a build, or tells of one of another manifest than `manifest`.
    """
    try:
        document = load_foreign_object(read_regular(path, _MAX_BYTES), str(path))
    except FileNotFoundError:
        raise SpecError(str(path), "does not exist", _WANTED) from None
    _check_manifest(path, document, manifest)
    try:
        phases = _Phases.model_validate(document, strict=False).phases
        outcome = _Outcome.model_validate(document.get("cache", document), strict=False)
    except ValidationError as error:
        raise SpecError(
            str(path), f"does not tell where a build's time went: {first_problem(error)}", _WANTED
        ) from error
    return _build_time(path, phases, outcome)


def _check_manifest(path: Path, document: Mapping[str, Any], manifest: Manifest) -> None:
    """`build cache` does not print its manifest; `build` does."""
    told = document.get("manifest")
    of = told.get("id") if isinstance(told, dict) else None
    if of is not None and of != manifest.id:
        raise SpecError(
            str(path),
            f"tells of a build of another manifest, {str(of)[:16]!r}",
            f"that of {manifest.id[:16]}",
        )


def _build_time(path: Path, phases: tuple[_Phase, ...], outcome: _Outcome) -> BuildTime:
    work = {_WORK.get(kind, kind): round(seconds, 3) for kind, seconds in outcome.worker_seconds.items()}
    idle = outcome.num_workers * outcome.seconds - sum(outcome.worker_seconds.values())
    rows = tuple(
        BuildPhase(name=one.phase, begin=one.begin, seconds=round(max(0.0, one.end - one.begin), 4))
        for one in phases
    )
    return BuildTime(
        path=str(path),
        seconds=max((one.end for one in phases), default=0.0),
        phases=rows,
        num_traced=outcome.num_traced,
        num_compiled=outcome.num_compiled,
        num_workers=outcome.num_workers,
        worker_seconds={**work, "idle": round(max(0.0, idle), 3)},
    )
