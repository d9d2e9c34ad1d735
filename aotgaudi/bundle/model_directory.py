"""A model directory: which of its files a server reads, and how a bundle is bound to them.

A receipt may bind a model. It then names by digest every file of the directory that a server reads, so that a signature of
the bundle covers these files too. A bound file is parsed from exactly the bytes that were hashed. A file that would be read
but is not bound is refused. Other files (``README.md``) are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotgaudi.bundle.trust import OwnerRule
from aotgaudi.digest import Digest
from aotgaudi.document import load_foreign_object
from aotgaudi.errors import CorruptError, SpecError, UntrustedError, store_error
from aotgaudi.files import open_regular, read_whole

if TYPE_CHECKING:
    from aotgaudi.bundle.bundle import Bundle
    from aotgaudi.spec.build_spec import BuildSpec
    from aotgaudi.spec.model import ModelSpec

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOOL_USE_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The template for requests with tools. Older bundles bind models without it, so it is read only where it is bound."""
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

TEXTS = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, WEIGHTS_INDEX)
"""The files that a server reads from a model directory if they exist, in addition to the files of weights."""

MAX_TEXT_BYTES = 32 << 20
"""The largest JSON file, template, or header of a file of weights. The largest known index has 15 MB."""
MAX_TOKENIZER_BYTES = 256 << 20

_PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 8

WEIGHTS_REMEDY = "convert it with: aotgaudi model import SOURCE DIR"


@dataclass(frozen=True)
class ModelDirectory:
    """The directory at `path`. `bound` are the files that may be read, by name; None if nothing is bound.

    Every method raises SpecError for a file that cannot be read (not a regular file, too large, not what its name says),
    CorruptError for a file that is not the bound one, and UntrustedError for a file that `owners` does not allow (None
    allows all owners), or that is not bound although others are. A plain value, which may be sent to another process.
    """

    path: Path
    bound: Mapping[str, Digest] | None = None
    owners: OwnerRule | None = None

    def check_owners(self) -> None:
        """Raises UntrustedError if other users could replace the directory or the files in it."""
        if self.owners is None:
            return
        try:
            self.owners.check(self.path, self.path.stat())
            self.owners.check_parents(self.path)
            templates = (self.path / TOOL_USE_TEMPLATE).parent
            if self.may_read(TOOL_USE_TEMPLATE) and templates.exists():
                self.owners.check(templates, templates.stat())
        except FileNotFoundError:
            return  # Reading config.json will report it.
        except OSError as error:
            raise store_error("look at", self.path, error) from error

    def may_read(self, name: str) -> bool:
        """Returns whether a file is bound, or nothing is."""
        return self.bound is None or name in self.bound

    def expected(self, name: str) -> Digest | None:
        """Returns the digest that the file `name` must have; None if no model is bound or there is no such file."""
        if self.bound is None:
            return None
        digest = self.bound.get(name)
        if digest is None and os.path.lexists(self.path / name):
            raise UntrustedError(
                f"{self.path / name} is not one of the files that the bundle binds (remove it, or bind the model"
                " as it is: aotgaudi build bundle MANIFEST -o DIR --model DIR)"
            )
        return digest

    @contextlib.contextmanager
    def open(self, name: str, expected: Digest | None = None) -> Iterator[FileIO]:
        """Opens a file. Raises FileNotFoundError, and CorruptError for another size than `expected`'s: nothing is hashed."""

        def examine(path: Path, status: os.stat_result) -> None:
            if self.owners is not None:
                self.owners.check(path, status)
            if expected is not None and status.st_size != expected.size_bytes:
                raise CorruptError(
                    f"{path} is not what the bundle binds: it has {status.st_size} bytes, should be"
                    f" {expected.size_bytes} bytes (use the model that was bound)"
                )

        with open_regular(self.path / name, examine) as file:
            yield file

    def read(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes | None:
        """Returns the bytes of a file; None if there is no such file."""
        expected = self.expected(name)
        try:
            with self.open(name, expected) as file:
                data = read_whole(file, self.path / name, max_bytes)
        except FileNotFoundError:
            if expected is None:
                return None
            raise CorruptError(f"{self.path / name} is missing, and the bundle binds it") from None
        if expected is not None:
            self.compare(name, Digest.of(data), expected)
        return data

    def compare(self, name: str, found: Digest, expected: Digest) -> None:
        """Raises CorruptError unless the file `name` is the bound one."""
        if found != expected:
            raise CorruptError(
                f"{self.path / name} is not what the bundle binds: it has sha256 {found.sha256[:12]}..., {found.size_bytes}"
                f" bytes, should be {expected.sha256[:12]}..., {expected.size_bytes} bytes (use the model that was bound)"
            )

    def digest(self, name: str, expected: Digest | None = None) -> Digest:
        """Returns the digest of a file, read piece by piece, once its size is `expected`'s or what its kind allows.

        Raises FileNotFoundError.
        """
        with self.open(name, expected) as file:
            if expected is None:
                self._require_plausible(name, file)
            state, num_bytes = hashlib.sha256(), 0
            while piece := file.read(_PIECE_BYTES):
                state.update(piece)
                num_bytes += len(piece)
        return Digest(state.hexdigest(), num_bytes)

    def _require_plausible(self, name: str, file: FileIO) -> None:
        """Raises SpecError for a text that no server would read, or a file of weights that is longer than its tensors."""
        most = MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_TEXT_BYTES
        if name not in TEXTS:
            most = max(most, safetensors_size(file))
            file.seek(0)
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most:
            raise SpecError(str(self.path / name), f"has {size_bytes} bytes, at most {most} are read")

    def verify(self) -> None:
        """Compares every bound file, and refuses unbound files that would be read."""
        for name in {*TEXTS, WEIGHTS, *(self.bound or ())}:
            expected = (
                None if name == WEIGHTS and WEIGHTS_INDEX in (self.bound or ()) else self.expected(name)
            )
            try:
                found = None if expected is None else self.digest(name, expected)
            except FileNotFoundError:
                raise CorruptError(f"{self.path / name} is missing, and the bundle binds it") from None
            if expected is not None and found is not None:
                self.compare(name, found, expected)

    def describe(self) -> str:
        """Returns what is bound, in words."""
        return "not bound" if self.bound is None else f"bound ({len(self.bound)} files)"

    def read_object(self, name: str) -> dict[str, Any]:
        """Returns the JSON object in a file, or an empty object if there is no such file."""
        data = self.read(name)
        return {} if data is None else load_foreign_object(data, str(self.path / name))

    def weight_files(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Returns the sorted names of the files that hold the tensors `wanted` (None: all tensors)."""
        data = self.read(WEIGHTS_INDEX)
        if data is None:
            if not (self.path / WEIGHTS).exists():
                raise SpecError(str(self.path), f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}", WEIGHTS_REMEDY)
            return [WEIGHTS]
        where = str(self.path / WEIGHTS_INDEX)
        weight_map = load_foreign_object(data, where).get("weight_map")
        if not isinstance(weight_map, dict):
            raise SpecError(where, "is not a safetensors index: it has no object weight_map")
        names = weight_map if wanted is None else [name for name in wanted if name in weight_map]
        files = {weight_map[name] for name in names if _is_file_name(name, weight_map[name], where)}
        return sorted(files)


def safetensors_size(file: FileIO) -> int:
    """Returns how long the header of a safetensors file says that it is; 0 if this is no such header."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_TEXT_BYTES:
        return 0
    try:
        tensors = json.loads(file.read(length))
        ends = (value["data_offsets"][1] for name, value in tensors.items() if name != "__metadata__")
        return _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return 0


def _is_file_name(tensor: str, value: object, where: str) -> bool:
    """Returns True if `value` is the name of a file in the directory. Otherwise raises SpecError."""
    if not isinstance(value, str):
        raise SpecError(
            where, f"is not a safetensors index: {tensor!r:.100} is in {value!r:.100}, no file name"
        )
    if Path(value).name != value or "\0" in value:
        raise SpecError(where, f"names a file outside its directory: {value!r:.100}")
    return True


def bind_model(path: Path, spec: BuildSpec) -> dict[str, Digest]:
    """Returns the digest, by name, of every file that a server reads from the model directory at `path`.

    Raises SpecError if the directory cannot be served with bundles of `spec`.
    """
    from aotgaudi.bundle.receipt import require_file_name  # Request workers need none of this.

    model = ModelDirectory(path)
    check_model(spec, model)
    texts = (*TEXTS, TOOL_USE_TEMPLATE)
    names = [name for name in texts if os.path.lexists(path / name)] + model.weight_files()
    for name in names:
        try:
            require_file_name(name)
        except ValueError as error:
            raise SpecError(str(path), f"has a file that cannot be bound: {error}") from error
    try:
        return {name: model.digest(name) for name in names}
    except FileNotFoundError as error:
        raise SpecError(str(error.filename), "is missing", WEIGHTS_REMEDY) from error
    except OSError as error:
        raise store_error("read", path, error) from error


def open_model(bundle: Bundle, path: Path, *, allow_unbound: bool = False) -> ModelDirectory:
    """Returns the model directory to serve `bundle` with. None of its files has been read.

    Raises UntrustedError if a signature is required and does not cover a model, unless `allow_unbound`, or if others may
    write to the directory. Raises SpecError for a capture.
    """
    policy, bound = bundle.policy, bundle.require_programs().model
    if policy.keys and bound is None and not allow_unbound:
        raise UntrustedError(
            f"bundle {bundle.path} does not bind its model: trusted keys have signed for the code, not for weights,"
            " tokenizer and chat template (bind them: aotgaudi build bundle MANIFEST -o DIR --model DIR --sign-key"
            " FILE; or trust the directory: --allow-unbound-model)"
        )
    model = ModelDirectory(path, bound, policy.model_owners)
    model.check_owners()
    return model


def check_model(spec: BuildSpec, model: ModelDirectory) -> None:
    """Raises SpecError unless the directory's configuration gives the same graphs as the manifest's."""
    found = model_spec(model, spec.model.dtype).model_copy(
        update={"quantization": spec.model.quantization}  # Chosen by the builder; no config.json has it.
    )
    differences = spec.model.signature().differences(found.signature())
    if differences:
        name, wanted, got = differences[0]
        others = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise SpecError(
            str(model.path / CONFIG),
            f"is another model than the bundle was built for: {name} is {got}, the bundle has {wanted}{others}",
            f"serve {spec.model.name}, or build a bundle for this model",
        )


def model_spec(model: ModelDirectory, dtype: str) -> ModelSpec:
    """Returns the model of config.json, in `dtype`. Raises as the methods of `ModelDirectory` do."""
    from aotgaudi.spec.model import ModelSpec
    from aotgaudi.spec.parse import value_from_json

    data = model.read(CONFIG)
    if data is None:
        raise SpecError(str(model.path), f"has no {CONFIG}", "a Hugging Face model directory")
    where = str(model.path / CONFIG)
    config = load_foreign_object(data, where)
    try:
        return value_from_json(
            ModelSpec, {"name": model.path.name or "model", "dtype": dtype, "config": config}
        )
    except SpecError as error:
        raise SpecError(where, f"{error.where} {error.problem}", error.remedy) from error
