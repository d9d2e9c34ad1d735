"""Reading and writing a spec: TOML, and the files that it may name: config.json, a bucket file, a quantization's config."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import SpecError, shortened
from aotgaudi.files import read_regular, write_atomic
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.sampler import default_settings
from aotgaudi.spec.scheduler import defragments_by_default

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_V = TypeVar("_V", bound=SpecValue)

_MAX_CONFIG_BYTES = 32 << 20
_FLOAT_TAG, _SPECIAL_FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")


def load_spec(path: Path) -> BuildSpec:
    """Reads a spec file and the config file that it names.

    Raises:
        SpecError: one mistake, with the file, the dotted path of the key, and what would be right.
    """
    try:
        return parse_spec(read_text(path, "a spec in TOML"), path.parent)
    except SpecError as error:
        if error.where == str(path):
            raise
        raise SpecError(f"{path}: {error.where}", error.problem, error.remedy) from error


def parse_spec(text: str, folder: Path) -> BuildSpec:
    """Parses the text of a spec; a relative ``model.config`` is relative to `folder`. Raises SpecError."""
    try:
        return _spec_of(_tables(text), folder)
    except RecursionError as error:
        raise SpecError("TOML syntax", "is nested too deeply", "a few levels of tables") from error


def _tables(text: str) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise SpecError("TOML syntax", str(error)) from error
    return tables


def _spec_of(tables: dict[str, Any], folder: Path) -> BuildSpec:
    """The spec of parsed TOML, with the files that it names."""
    model = tables.get("model")
    if isinstance(model, dict):
        tables["model"] = _model_of(model, folder)
    bucketing = tables.get("bucketing")
    if isinstance(bucketing, dict) and "file" in bucketing:
        if not isinstance(bucketing["file"], str):
            raise SpecError("bucketing.file", f"is {bucketing['file']!r}", "the path of a bucket file")
        rest = {name: value for name, value in bucketing.items() if name != "file"}
        tables["bucketing"] = {**rest, "file_text": read_bucket_file(folder / bucketing["file"])}
    for where, value in _not_json(tables, ""):
        raise SpecError(where, f"is {value}", "a string, finite number, boolean, list or table")
    return spec_from_json(tables)


def _model_of(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The table of the model, with the content of its config, and the digest of its quantization's."""
    if isinstance(model.get("config"), str):
        model = {**model, "config": read_config(folder / model["config"])}
    quantization = model.get("quantization")
    if not (isinstance(quantization, dict) and "config" in quantization):
        return model
    where, path = "model.quantization.config", quantization["config"]
    if not isinstance(path, str):
        raise SpecError(where, f"is {path!r}", "the path of the file that QUANT_CONFIG names")
    rest = {name: value for name, value in quantization.items() if name != "config"}
    return {**model, "quantization": {**rest, "config_sha256": json_sha256(folder / path, where)}}


def spec_from_json(value: dict[str, Any]) -> BuildSpec:
    """Returns the spec that a JSON value stands for (see ``BuildSpec.to_json``). Raises SpecError."""
    return value_from_json(BuildSpec, value)


def value_from_json(kind: type[_V], value: dict[str, Any]) -> _V:
    """Returns a spec, or one of its tables, that a JSON value stands for. Raises SpecError.

    The value is validated as JSON text, where a list may stand for a tuple under strict types.
    """
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        mistake = first_mistake(error, kind)
        raise SpecError(mistake.where or "spec", mistake.problem, mistake.remedy) from error


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a model's config.json as Python reads it: NaN, Infinity and a byte-order mark are no mistakes.

    Raises SpecError.
    """
    what = "the model's config.json"
    text = read_text(path, what, "model.config", lambda path: read_regular(path, _MAX_CONFIG_BYTES))
    try:
        config = json.loads(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}"))
    except (ValueError, RecursionError) as error:
        raise SpecError("model.config", f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError("model.config", f"{path} holds no JSON object", "a Hugging Face config.json")
    return config


def finite_json(value: Any) -> Any:
    """Returns a JSON value that can be hashed: a number that is not finite becomes ``{"__float__": "Infinity"}``.

    The form is transformers' own (configuration_utils.py, ``_encode_special_floats``).
    """
    if isinstance(value, dict):
        return {name: finite_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_TAG: json.dumps(value)}
    return value


def json_floats(value: Any) -> Any:
    """Returns what `finite_json` was given, in new lists and dicts: numbers as transformers' configurations hold them."""
    if isinstance(value, dict):
        tag = value.get(_FLOAT_TAG)
        if len(value) == 1 and tag in _SPECIAL_FLOATS:
            return float(tag)
        return {name: json_floats(item) for name, item in value.items()}
    return [json_floats(item) for item in value] if isinstance(value, list) else value


def json_sha256(path: Path, where: str) -> str:
    """Returns the sha256 of a JSON file's content, 64 hex digits: its spacing and the order of its keys do not count.

    Raises SpecError, which names `where`.
    """
    text = read_text(path, "a file of JSON", where)
    try:
        return sha256_bytes(canonical_json(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise SpecError(where, f"{path} is not JSON: {error}", "a file of JSON") from error


def read_bucket_file(path: Path) -> str:
    """Returns the text of a bucket file. Raises SpecError."""
    return read_text(path, "a bucket file", "bucketing.file")


def read_text(
    path: Path, wanted: str, where: str = "", read: Callable[[Path], bytes] = Path.read_bytes
) -> str:
    """Returns the text of a file, or of a pipe. Raises SpecError, which names the path, after `where` if it is given."""
    try:
        return read(path).decode()
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, UnicodeDecodeError):
            problem = f"is not UTF-8 text: {error.reason} at byte {error.start}"
        name = repr(str(path)) if "\0" in str(path) else str(path)
        raise SpecError(where or name, f"{name} {problem}" if where else problem, wanted) from error


def _not_json(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields the place and value of everything that strict JSON cannot say: dates, times, nan, inf."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _not_json(item, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{where}.{index}")
    elif isinstance(value, (datetime.date, datetime.time)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield where, value


# Mistakes


@dataclass(frozen=True, slots=True)
class Mistake:
    """`where`: a dotted path (empty: the whole); `problem`: what is wrong; `remedy`: what would be right.

    As text it is always one line of printable characters.
    """

    where: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        text = f"{place}{self.problem}" + (f" ({self.remedy})" if self.remedy else "")
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def first_mistake(error: ValidationError, model: type[BaseModel]) -> Mistake:
    """Returns the likely cause: a wrong schema, else an unknown key, else the first finding."""
    details = min(error.errors(include_url=False), key=_rank)
    where = ".".join(part for part in map(str, details["loc"]) if not part.startswith("<"))  # Tags of unions.
    if details["type"] == "extra_forbidden":
        return Mistake(
            where, "unknown key", _nearest(str(details["loc"][-1]), _keys_at(model, details["loc"]))
        )
    if details["type"] == "json_invalid":
        return Mistake(where, "is not JSON", details["msg"].removeprefix("Invalid JSON: "))
    if details["type"] == "missing":
        return Mistake(where, "is missing", "it has no default")
    return Mistake(where, f"is {shortened(repr(details['input']))}", _expected(details))


def _rank(details: ErrorDetails) -> int:
    if details["loc"] == ("schema",):
        return 0
    return 1 if details["type"] == "extra_forbidden" else 2


def _expected(details: ErrorDetails) -> str:
    message = details["msg"].replace(", 'hpu' or 'fake'", " or 'hpu'")  # That backend is for tests.
    return message.replace("Input should be", "should be", 1)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys of the table that holds the last part of `location`."""
    for part in location[:-1]:
        inner = [_model_in(f.annotation) for n, f in model.model_fields.items() if part in (n, f.alias)]
        model = next((found for found in inner if found is not None), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model that an annotation names, also inside ``tuple[...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model is not None), None)


# Writing

_ALWAYS_WRITTEN = ("strategy", "version", "contiguous_pa", "prefix_caching")
"""Keys of the table ``bucketing`` that are written even at their default, since readers look for them."""


def write_spec(path: Path, spec: BuildSpec) -> None:
    """Writes a spec to `path`, and next to it the files that it names: the model's config and a bucket file's text.

    For ``x.toml`` they are ``x.config.json`` and ``x.buckets.txt``. Defaults are left out.

    Raises:
        StoreError: a file cannot be written.
    """
    stem = path.name.removesuffix(".toml")
    tables = spec_tables(spec)
    config = json.dumps(spec.model.config, indent=2, ensure_ascii=False)
    tables["model"]["config"] = _write_beside(path, f"{stem}.config.json", config + "\n")
    text = spec.bucketing.file_text
    if text is not None and "\r" not in text:  # a text file's line ends are read as \n
        del tables["bucketing"]["file_text"]
        tables["bucketing"]["file"] = _write_beside(path, f"{stem}.buckets.txt", text)
    import tomli_w  # Only who writes a spec needs it.

    write_atomic(path, tomli_w.dumps(tables).encode("utf-8"))


def spec_tables(spec: BuildSpec) -> dict[str, Any]:
    """Returns the tables of a spec without the defaults; an absent key stands for None."""
    tables = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    bucketing = {name: getattr(spec.bucketing, name) for name in _ALWAYS_WRITTEN}
    if spec.sampler.settings == default_settings(spec.scheduler.engine):
        tables.get("sampler", {}).pop("settings", None)
    else:
        tables.setdefault("sampler", {})["settings"] = spec.sampler.model_dump(mode="json")["settings"]
    tables.setdefault("defrag", {})["enabled"] = spec.defrag.enabled
    default = defragments_by_default(spec.scheduler.engine, spec.target.backend, spec.bucketing.contiguous_pa)
    if spec.defrag.enabled is default:
        del tables["defrag"]["enabled"]
    for name in ("sampler", "defrag"):
        if not tables.get(name, True):
            del tables[name]
    first = {name: tables.pop(name) for name in ("schema", "model", "limits")}
    return {**first, "bucketing": {**bucketing, **tables.pop("bucketing", {})}, **tables}


def _write_beside(path: Path, name: str, text: str) -> str:
    write_atomic(path.with_name(name), text.encode("utf-8"))
    return name
