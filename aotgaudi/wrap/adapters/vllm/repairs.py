"""Known defects of some versions of vLLM that keep it from loading what it saved. The witness mends them, by feature."""

from __future__ import annotations

from aotgaudi.wrap.adapters.base import Repair

FINALIZE_LOADING = Repair(
    id="vllm.finalize-loading",
    defect=(
        "On a CPU the saved artifact is torch's own bundled callable. After loading it vLLM calls its finalize_loading,"
        " a method that only vLLM's own kind of artifact has; the AttributeError is caught, and all is generated again."
    ),
    feature="torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable has no finalize_loading of its own",
    action="gives that class a finalize_loading that does nothing: the artifact is complete once it is deserialised",
    upstream="vllm/compilation/decorators.py, since vllm-project/vllm#36098",
)

REPAIRS = (FINALIZE_LOADING,)
