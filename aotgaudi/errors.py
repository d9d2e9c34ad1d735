"""The errors that users see, on the command line and from the Python API, and their exit codes.

::

    AotGaudiError                 exit code 1
      SpecError                   2   what the user wrote (spec, option, model directory) cannot be used
      ManifestError               2   a manifest file that cannot be used
        StaleManifestError        3   a committed manifest differs from what its spec gives now
      NotWarmError                3   an entry has no artifact
      MissingPackageError         2   a package is not installed; names the extra that brings it
      StoreError                  2   the store cannot be read or written
        MissingObjectError        2   an object that something refers to is not in the store
        RemoteError               2   a remote (registry, object store) cannot be used
      CorruptError                4   bytes do not match their digest
      UntrustedError              4   bytes are intact but nobody trusted vouches for them
      NotReproducibleError        4   a unit compiled again gave other bytes
      TargetError                 5   this machine cannot run what was compiled
      CompileError                6   a unit failed to compile, or computes something else
        CardError                 6   the card to compile on could not be acquired
      CaptureError                6   a wrapped server failed, or its caches were not proved complete
      UnexaminedError             6   doctor could not reach the device
      BuildInterruptedError     130   a build was stopped at a unit boundary; resumable
      CoverageError               7   a reachable step has no entry
      CompileForbiddenError       1   something tried to compile, or to start a process, while serving
      RequestError                -   a request is refused; carries an HTTP status

Packages refine some of these (a `NoAnswerError` is a RemoteError), and have errors that never leave them.

A message says what was wrong, where, and what would be right. The command line prints it in one line and exits with
``exit_code``. A traceback is a bug of ours. Each line of a message has at most `MOST_LINE_CHARACTERS` characters, because it
may quote megabytes of a user's file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

MOST_LINE_CHARACTERS = 2_000
_MOST_WHERE_CHARACTERS = 300
_MOST_PROBLEM_CHARACTERS = 1_000
_TAIL_CHARACTERS = 80


class AotGaudiError(Exception):
    """Base of all errors that are raised on purpose. The process exits with ``exit_code``."""

    exit_code = 1

    def __str__(self) -> str:
        """Returns the message, with each line shortened to `MOST_LINE_CHARACTERS`."""
        return "\n".join(bounded(line, MOST_LINE_CHARACTERS) for line in super().__str__().split("\n"))


def bounded(text: str, most: int) -> str:
    """Returns `text`; if it is too long, its beginning and end in about `most` characters, and the length of the gap."""
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most - _TAIL_CHARACTERS]}... ({left_out:,} characters) ...{text[-_TAIL_CHARACTERS:]}"


def shortened(text: str, most: int = 60) -> str:
    """Returns `text`; if it is too long, its beginning and three dots, in `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(text: str) -> str:
    """Returns a user's text for an error message: shortened and in quotes."""
    return repr(shortened(text))


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun: ``1 unit``, ``2,048 blocks``, ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error, or the name of its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class SpecError(AotGaudiError):
    """What the user wrote cannot be used. Names the place (``where``: dotted path or file), the problem and the remedy."""

    exit_code = 2

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where, self.problem, self.remedy = where, problem, remedy
        where, problem = bounded(where, _MOST_WHERE_CHARACTERS), bounded(problem, _MOST_PROBLEM_CHARACTERS)
        super().__init__(f"{where}: {problem}" + (f" ({remedy})" if remedy else ""))

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str]]:
        """Pickles by its parts: workers send it to their parent."""
        return type(self), (self.where, self.problem, self.remedy)


class ManifestError(AotGaudiError):
    """A manifest (or receipt, or bundle index) is malformed or of another format version."""

    exit_code = 2


class StaleManifestError(ManifestError):
    """A committed manifest differs from what its spec enumerates to today. Names what differs."""

    exit_code = 3


class NotWarmError(AotGaudiError):
    """An entry that must be warm has no artifact."""

    exit_code = 3


EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "build": ("torch", "transformers", "safetensors"),
        "serve": ("torch", "safetensors", "tokenizers", "jinja2", "llguidance", "starlette", "uvicorn"),
        "ray": ("ray",),
        "s3": ("s3fs",),
        "http": ("aiohttp",),
        "gguf": ("gguf", "accelerate"),
        "otel": (
            *("opentelemetry_sdk", "opentelemetry_exporter_otlp_proto_http"),
            "opentelemetry_instrumentation_asgi",
        ),
    }
)
"""Extra -> the modules that it adds to the light package. For [otel], the packages that contain these modules."""


class MissingPackageError(AotGaudiError):
    """`package` is needed and not installed here. The extra `extra` of aotgaudi brings it."""

    exit_code = 2

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed (pip install 'aotgaudi[{extra}]')")

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str]]:
        """Pickles by its parts."""
        return type(self), (self.package, self.extra)

    @classmethod
    def of(cls, error: ImportError, preferred: str) -> MissingPackageError | None:
        """Returns the MissingPackageError for a failed import; None if no extra brings the module.

        `preferred` is the extra to name if several bring the module.
        """
        module = (error.name or "").partition(".")[0]
        extras = [extra for extra, modules in EXTRAS.items() if module in modules]
        if not extras:
            return None
        return cls(module, preferred if preferred in extras else extras[0])


class StoreError(AotGaudiError):
    """The store, or another place that must be written to, cannot be used (permissions, disk full)."""

    exit_code = 2


class MissingObjectError(StoreError):
    """A referenced object is not in the store. Whatever produced it must be built again."""


class RemoteError(StoreError):
    """A remote cannot be reached, refuses, or answers something other than what was asked for."""


class CorruptError(AotGaudiError):
    """Bytes do not match the digest that names them."""

    exit_code = 4


class UntrustedError(AotGaudiError):
    """Bytes are intact, but no trusted party vouches for them."""

    exit_code = 4


class NotReproducibleError(AotGaudiError):
    """A unit compiled again gave other bytes than the store has, so one of the two builders cannot be relied on."""

    exit_code = 4


class TargetError(AotGaudiError):
    """The code was compiled for a target that this machine does not satisfy. Names what differs."""

    exit_code = 5


class CompileError(AotGaudiError):
    """A unit failed to compile, or its compiled form disagrees with eager PyTorch."""

    exit_code = 6


class ModelDiffersError(CompileError):
    """The graphs of a model do not compute what the model computes. No build of it can be right."""


class CardError(CompileError):
    """The card to compile on could not be acquired: another process has it, or its driver does not answer."""


class CaptureError(AotGaudiError):
    """A server failed during its capture, or its captured caches lack something that it needs."""

    exit_code = 6


class UnexaminedError(AotGaudiError):
    """The device to examine could not be reached: no card is free, or its software is not installed."""

    exit_code = 6


class BuildInterruptedError(AotGaudiError):
    """A build was asked to stop and stopped at a unit boundary. The next run continues from there."""

    exit_code = 130


class CoverageError(AotGaudiError):
    """A step that the scheduler can form has no entry."""

    exit_code = 7


class CompileForbiddenError(AotGaudiError):
    """Something tried to compile or to start a process in a server that must not do so."""


class RequestError(AotGaudiError):
    """A request is refused, or fails on its own (500). ``param`` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, http_status: int = 400) -> None:
        self.param, self.http_status = param, http_status
        super().__init__(bounded(message, _MOST_PROBLEM_CHARACTERS))

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        """Returns this error with the field renamed, if `names` has another name for it."""
        param = names.get(self.param or "", self.param)
        return RequestError(str(self), param=param, http_status=self.http_status)


def store_error(doing: str, path: Path, error: OSError, *, needed_bytes: int = 0) -> StoreError:
    """Returns the StoreError for `error`, which occurred at `path` while `doing` something (an infinitive).

    `needed_bytes` is how much was to be written, or 0 if unknown. The message mentions it if the disk or a quota is full.
    """
    reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    remedy = _remedy(error.errno, needed_bytes)
    return StoreError(f"cannot {doing} {path}: {reason}" + (f" ({remedy})" if remedy else ""))


@contextlib.contextmanager
def store_errors(doing: str, path: Path, *, needed_bytes: int = 0) -> Iterator[None]:
    """Raises the `store_error` for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise store_error(doing, path, error, needed_bytes=needed_bytes) from error


_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.EROFS: "the file system is read-only: remount it, or use another place",
        errno.EMFILE: "too many open files: raise `ulimit -n`",
        errno.ENFILE: "too many open files: raise `ulimit -n`",
        errno.ENAMETOOLONG: "a path has at most 4,095 bytes, and a name 255: use a shorter one",
        errno.EIO: "the device failed: check it before trusting what it holds",
    }
)


def _remedy(code: int | None, needed_bytes: int) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = f"{needed_bytes} bytes are needed: " if needed_bytes else ""
        return f"{needed}free space there, or use another place"
    if code in (errno.EACCES, errno.EPERM):
        return f"make it accessible to uid {os.geteuid()}, or use another place"
    return _REMEDIES.get(code or 0, "")


_NO_THREAD, _NO_MEMORY = "can't start new thread", "can't allocate memory"
_NOT_LOADED = ("cannot allocate memory", "failed to map segment", "cannot open shared object file")
"""What the dynamic linker says of a library that it cannot load."""


def machine_error(error: Exception) -> AotGaudiError | None:
    """Returns the error for what the machine refused to a process; None if `error` has another cause."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY in str(error)):
        return StoreError("there is not enough memory (raise `ulimit -v`, or the container's limit)")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return StoreError("no thread can be started (raise `ulimit -u`, or the container's pids limit)")
    if isinstance(error, OSError) and error.errno is not None:
        return _system_error(error)
    if isinstance(error, (OSError, ImportError)) and any(said in str(error) for said in _NOT_LOADED):
        return StoreError(f"a library cannot be loaded: {first_line(error)} (is `ulimit -v` too low?)")
    return None


def _system_error(error: OSError) -> AotGaudiError:
    if error.filename is None:
        remedy = " (raise `ulimit -u`, or the container's pids limit)" if error.errno == errno.EAGAIN else ""
        return StoreError(f"the system refused: {error.strerror}{remedy}")
    path = Path(os.fsdecode(error.filename))
    if error.errno == errno.ENAMETOOLONG:  # Even checking whether such a file exists raises it.
        return SpecError(str(path), "is too long a name for a file", _remedy(error.errno, 0))
    return store_error("use", path, error)
