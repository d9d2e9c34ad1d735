"""Builds and caches the graphs that LLM servers on static-shape accelerators compile.

`__all__` names the public Python API. Each name is imported on first use::

    result = aotgaudi.build("chat.toml", "chat.bundle")
    result.manifest.id, result.outcome.compiled, result.bundle

    bundle = aotgaudi.open_bundle("chat.bundle", aotgaudi.TrustPolicy.demanding(["release.pub"]))
    bundle.manifest.entries, bundle.receipt.target, aotgaudi.verify_bundle(bundle).is_intact

    with aotgaudi.LLM("chat.bundle", "my-model") as llm:
        print(llm.generate("The sea is")[0].text)

`build` needs the extra [build] and `LLM` needs [serve]. Without its extra, each raises MissingPackageError. The other errors
are also in `aotgaudi.errors`.
"""

TYPE_CHECKING = False  # As in typing, which is not imported: the command line has not looked at sys.path yet.
if TYPE_CHECKING:
    from aotgaudi.bundle.bundle import Bundle, open_bundle
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.bundle.verify import verify_bundle
    from aotgaudi.compile.pipeline import BuildResult, Workers, build
    from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
    from aotgaudi.llm.api import LLM, Output
    from aotgaudi.share.remote_cache import Sharing

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BuildResult",
    "Bundle",
    "Output",
    "SamplingParams",
    "Sharing",
    "StructuredOutputs",
    "TrustPolicy",
    "Workers",
    "__version__",
    "build",
    "open_bundle",
    "verify_bundle",
]

_HOMES = {
    "BuildResult": "aotgaudi.compile.pipeline",
    "Bundle": "aotgaudi.bundle.bundle",
    "LLM": "aotgaudi.llm.api",
    "Output": "aotgaudi.llm.api",
    "SamplingParams": "aotgaudi.engine.sampling_params",
    "Sharing": "aotgaudi.share.remote_cache",
    "StructuredOutputs": "aotgaudi.engine.sampling_params",
    "TrustPolicy": "aotgaudi.bundle.trust",
    "Workers": "aotgaudi.compile.pipeline",
    "build": "aotgaudi.compile.pipeline",
    "open_bundle": "aotgaudi.bundle.bundle",
    "verify_bundle": "aotgaudi.bundle.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        from aotgaudi.errors import MissingPackageError

        missing = MissingPackageError.of(error, preferred="serve")
        raise missing or error from error
