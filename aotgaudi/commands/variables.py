"""Decides which variables of an environment count in a launch's key, which are conditions, and which are secrets.

Most of a process's environment is about something else: addresses of services, the state of a shell, the name of a pod. So
we look only at variables of compilers and servers: those in `NAMES`, and those with one of the `PREFIXES` or of the server's
prefixes. Each of these counts, known or not, unless there is a reason why it changes no code. A variable that vLLM gains
tomorrow counts from the first day.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_PREFIXES = """
    TORCH PYTORCH_ AOT_ INDUCTOR_ TRITON_ ATEN_ FUNCTORCH_ XFORMERS_
    CUDA_ CUBLAS CUDNN_ NVCC_ NVRTC_ NVIDIA_TF32_ HIP_ HIPCC_ ROCM_ HSA_ MIOPEN_ NCCL_ RCCL_
    FLASHINFER_ FLASH_ATTENTION_ DG_ DEEP_GEMM_ TVM_ TILELANG_ CUTE_DSL_ CUTLASS_ AITER_
    ONEDNN_ DNNL_ MKL_ MKLDNN_ OMP_ KMP_ GOMP_
    """
PREFIXES = tuple(_PREFIXES.split())
"""Prefixes of the variables of compilers, kernel libraries and frameworks."""

_NAMES = """
    CC CXX CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH MAX_JOBS NVCC_THREADS
    SOURCE_DATE_EPOCH
    """
NAMES = frozenset(_NAMES.split())
"""Variables that compilers read and that have none of the prefixes."""

_NEUTRAL: Mapping[str, str] = {
    "which cards are used; the target says what they are": "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES CUDA_DEVICE_ORDER",
    "how ranks speak to each other": "NCCL_* RCCL_* TORCH_NCCL_* TORCH_DISTRIBUTED_DEBUG",
    "logs": "TORCH_LOGS* TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES TORCH_SHOW_DISPATCH_TRACE *_LOG_LEVEL *_LOG_FILE",
    "how many compile at once": "TORCHINDUCTOR_COMPILE_THREADS MAX_JOBS NVCC_THREADS",
    "where files are kept": "TORCH_HOME TRITON_HOME CUDA_CACHE_PATH CUDA_CACHE_MAXSIZE",
    "the compiler counts by its name and by what it says of itself": "CC CXX",
    "where the toolkit lies; its version counts": "CUDA_HOME CUDA_PATH CUDA_ROOT ROCM_HOME ROCM_PATH HIP_PATH",
    "memory, not code": "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF VLLM_CPU_KVCACHE_SPACE",
    "set by container images to say what they are": "CUDA_VERSION CUDA_*_VERSION NV_* NVIDIA_*_CAPABILITIES ROCM_VERSION",
}


def by_name(table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each name with its reason, from a table: reason -> names in one text."""
    for reason, names in table.items():
        yield from ((name, reason) for name in names.split())


NEUTRAL: Mapping[str, str] = MappingProxyType(dict(by_name(_NEUTRAL)))
"""Names and patterns of variables that change no code of any server, each with the reason."""

KUBERNETES = re.compile(r"[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP)(_[A-Z]+)?)")
"""Variables that Kubernetes sets in every container for each service of the namespace, such as ``VLLM_SERVICE_HOST``."""

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_?KEY(_ID)?|PRIVATE_?KEY|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|BEARER)(_|$)"
    r"|(^|_)(AUTH|ACCESS|HF|HUB|SESSION)_TOKEN$"
)
_LAST_WORD = re.compile(r"(^|_)(TOKEN|KEY)$")
_USER_OF_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/@\s\"']+@")


def is_secret(name: str) -> bool:
    """Returns whether a variable or a flag holds a secret, judging by its name.

    >>> is_secret("HF_TOKEN"), is_secret("api-key"), is_secret("max-num-batched-tokens")
    (True, True, False)
    """
    return _LAST_WORD.search(_snake(name)) is not None or is_secret_key(name)


def is_secret_key(name: str) -> bool:
    """Returns the same for a key of a table. Keys of models' tables, such as ``image_token``, are no secrets."""
    return _SECRET.search(_snake(name)) is not None or name == "token"


def without_credentials(text: str) -> str:
    """Returns a text without the users and passwords in its URLs."""
    return _USER_OF_URL.sub(r"\1", text)


@dataclass(frozen=True, slots=True)
class Hashed:
    """A variable that changes no code, although the server hashes it.

    Attributes:
        reason: why it changes no code.
        is_of_pod: whether it must differ from pod to pod, so that it cannot be set as in the build.
    """

    reason: str
    is_of_pod: bool = False


@dataclass(frozen=True, slots=True)
class VariableRules:
    """The rules for the variables of one kind of server.

    Attributes:
        prefixes: prefixes of the server's variables, in addition to `PREFIXES`.
        neutral: names and patterns that change no code, each with the reason, in addition to `NEUTRAL`.
        hashed: variables that change no code, although the server hashes them.
    """

    prefixes: tuple[str, ...]
    neutral: Mapping[str, str]
    hashed: Mapping[str, Hashed]

    def reason(self, name: str) -> str | None:
        """Returns why a variable does not count; None if it counts."""
        if not self.is_looked_at(name):
            return "of nothing that compiles"
        if is_secret(name):
            return "a secret"
        if KUBERNETES.fullmatch(name):
            return "set by Kubernetes for a service"
        if name in self.hashed:
            return self.hashed[name].reason
        return _matching(name, self.neutral) or _matching(name, NEUTRAL)

    def is_looked_at(self, name: str) -> bool:
        """Returns whether a compiler or the server may read a variable."""
        return name.startswith((*PREFIXES, *self.prefixes)) or name in NAMES or name in self.hashed

    def keyed(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that count in the key. Credentials are removed from their values."""
        return {name: _text_of(value) for name, value in sorted(environ.items()) if self.reason(name) is None}

    def conditions(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that the server hashes although they change no code, with their values."""
        found = ((name, environ[name]) for name in sorted(self.hashed) if name in environ)
        return {name: _text_of(value) for name, value in found if not is_secret(name)}


def secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables whose values must not be in any captured file. Empty values are no secrets."""
    return {name: value for name, value in environ.items() if value and is_secret(name)}


def hugging_face_home(environ: Mapping[str, str]) -> str:
    """Returns where the hub's client keeps models and modules (huggingface_hub/constants.py)."""
    if environ.get("HF_HOME"):
        return environ["HF_HOME"]
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/root")) / ".cache")
    return str(Path(cache) / "huggingface")


def _text_of(value: str) -> str:
    """Returns a value in the form for a document: without credentials, and with bytes that are not UTF-8 as escapes."""
    return without_credentials(value).encode(errors="surrogateescape").decode(errors="backslashreplace")


def _matching(name: str, table: Mapping[str, str]) -> str | None:
    if name in table:
        return table[name]
    return next((why for pattern, why in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _snake(name: str) -> str:
    """Returns a name in capitals, with underscores for dashes and before inner capitals."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").upper()
