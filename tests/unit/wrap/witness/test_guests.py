"""The hooks on guests, with modules that have what the hooks look for, and no more. With real ones: tests/guests_real."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aotgaudi.wrap.witness import SITE
from tests.environment import ROOT
from tests.unit.wrap.witness.guest import Guest

pytestmark = pytest.mark.process

COUNTER = (ROOT / "tests/guests/standins/vllm/compilation/counter.py").read_text(encoding="utf-8")


class Site:
    """A folder of modules that a guest imports."""

    def __init__(self, folder: Path, guest: Guest) -> None:
        self.folder, self._guest = folder, guest

    def add(self, module: str, source: str = "") -> None:
        *packages, name = module.split(".")
        folder = self.folder
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")

    @property
    def path(self) -> str:
        return f"sys.path.insert(0, {str(self.folder)!r})\n"

    def run(self, code: str, **environ: str) -> None:
        self._guest.run(self.path + textwrap.dedent(code), **environ)


@pytest.fixture
def site(tmp_path: Path, guest: Guest) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder, guest)


def last_hooks(guest: Guest) -> dict[str, object]:
    return dict(guest.events("hooks")[-1]["hooks"])


def test_an_artifact_that_vllm_loads_is_told_by_its_place_in_the_model(guest: Guest, site: Site) -> None:
    site.add("vllm.compilation.counter", COUNTER)
    site.run(
        """
        from vllm.compilation.counter import compilation_counter
        class Model: _compile_tag = "backbone"
        def load(model, aot_compilation_path):
            compilation_counter.num_aot_artifacts_loaded += 1
        load(Model(), "/cache/torch_aot_compile/0123/rank_0_0/model")
        """
    )

    (loaded,) = guest.events("loaded")
    assert (loaded["what"], loaded["name"]) == ("aot", "backbone:rank_0_0/model")
    assert last_hooks(guest)["vllm.counters"] is True
    (counters,) = guest.events("counters")
    assert counters["values"] == {"vllm.num_aot_artifacts_loaded": 1}


def test_a_silent_miss_of_vllm_is_told_with_where_it_came_from(guest: Guest, site: Site) -> None:
    site.add("vllm.compilation.counter", COUNTER)
    site.run(
        """
        from vllm.compilation.counter import compilation_counter
        def compile_again(): compilation_counter.num_aot_compiles += 1
        compile_again()
        """
    )

    (generated,) = guest.events("generate")
    assert (generated["what"], generated["name"]) == ("aot", "compile_again")
    assert generated["stack"][0].endswith("compile_again")


def test_counting_down_and_copies_of_the_counter_are_no_events(guest: Guest, site: Site) -> None:
    site.add("vllm.compilation.counter", COUNTER)
    site.run(
        """
        import copy
        from vllm.compilation.counter import CompilationCounter, compilation_counter
        compilation_counter.num_aot_compiles = 0
        copied = copy.deepcopy(compilation_counter); copied.num_aot_compiles = 5
        CompilationCounter(num_aot_compiles=3)
        compilation_counter.num_cache_entries_updated += 1
        """
    )

    assert guest.events("generate") == []


COORDINATOR = (ROOT / "tests/guests/standins/vllm/v1/engine/coordinator.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_coordinator_of_ranks_has_a_witness_though_it_loads_no_plugins(
    guest: Guest, site: Site, method: str
) -> None:
    site.add("vllm.v1.engine.coordinator", COORDINATOR)
    program = site.folder / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from vllm.v1.engine.coordinator import DPCoordinatorProc
            if __name__ == "__main__":
                import aotgaudi_witness; aotgaudi_witness.register()
                context = multiprocessing.get_context({method!r})
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=DPCoordinatorProc.run_coordinator, name="VLLM_DP_Coordinator", args=(theirs,)
                )
                process.start()
                assert ours.recv() == "ready"
                ours.send("end")
                process.join()
                assert process.exitcode == 0
            """
        ),
        encoding="utf-8",
    )
    environ = {**guest.environment, "PYTHONPATH": f"{SITE}:{site.folder}"}
    subprocess.run([sys.executable, "-S", str(program)], env=environ, check=True)

    hellos = {event["role"]: event for event in guest.events("hello")}
    assert hellos["DPCoordinator"]["of"] == "MainProcess"
    assert hellos.keys() == {"APIServer", "DPCoordinator"}


def test_a_coordinator_that_gets_no_witness_runs_all_the_same(site: Site) -> None:
    site.add("vllm.v1.engine.coordinator", COORDINATOR)
    program = """
        from multiprocessing import Pipe
        from aotgaudi_witness.vllm import run_coordinator
        ours, theirs = Pipe()
        ours.send("end")
        run_coordinator(theirs)
        assert ours.recv() == "ready"
    """
    environ = {"PYTHONPATH": f"{SITE}:{site.folder}"}
    subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(program)], env=environ, check=True)


FACTORS = """
    import hashlib, json
    def hash_factors(items):
        return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()
"""


def test_what_vllm_hashes_is_told_once_and_no_secrets(guest: Guest, site: Site) -> None:
    site.add("vllm.config.utils", FACTORS)
    site.run(
        """
        class ModelConfig:
            def compute_hash(self):
                from vllm.config.utils import hash_factors
                return hash_factors({"model": "/m", "VLLM_API_KEY": "geheim", "long": "x" * 500, "n": 1, "of": {"a": 1}})
        assert ModelConfig().compute_hash() == ModelConfig().compute_hash()
        """
    )

    (factors,) = guest.events("factors")
    assert factors["name"] == "ModelConfig"
    assert {"model": "/m", "VLLM_API_KEY": "***", "n": 1}.items() <= factors["values"].items()
    assert factors["values"]["long"].startswith("sha256:")
    assert factors["values"]["of"].startswith("sha256:")
    assert len(factors["values"]) == 5


def test_many_factors_come_in_several_lines_of_one_name(guest: Guest, site: Site) -> None:
    site.add("vllm.config.utils", FACTORS)
    site.run(
        """
        from vllm.config.utils import hash_factors
        def environment(): return hash_factors({f"VLLM_VARIABLE_{i}": "x" * 50 for i in range(249)})
        environment()
        """
    )

    told = guest.events("factors")
    assert {event["name"] for event in told} == {"environment"}
    assert len(told) > 1
    assert sum(len(event["values"]) for event in told) == 249


def test_a_module_that_took_the_function_before_gets_the_other_one(guest: Guest, site: Site) -> None:
    """And modules that answer to any name, by importing something that is not there, are not asked."""
    site.add("vllm.config.utils", FACTORS)
    site.add("vllm.config.early", "from vllm.config.utils import hash_factors")
    site.add("vllm.lazy", "def __getattr__(name): raise ImportError('torchvision')")
    code = f"""
import sys; sys.path[:0] = [{str(site.folder)!r}, {str(SITE)!r}]
import vllm.config.early, vllm.lazy
import aotgaudi_witness; aotgaudi_witness.register()
vllm.config.early.hash_factors({{"a": 1}})
"""

    subprocess.run([sys.executable, "-I", "-S", "-c", code], env=guest.environment, check=True, timeout=60)

    assert guest.events("factors")[0]["values"] == {"a": 1}
    assert last_hooks(guest)["vllm.factors"] is True
    assert guest.events("fault") == []


ARTIFACT = """
    class SerializableCallable: pass
    class BundledAOTAutogradSerializableCallable(SerializableCallable):
        def __init__(self, function): self.function = function
        def __getattr__(self, name): return getattr(self.function, name)
"""
AOT_TYPES = "torch._dynamo.aot_compile_types"


def test_the_repair_gives_torchs_artifact_what_vllm_calls(guest: Guest, site: Site) -> None:
    site.add(AOT_TYPES, ARTIFACT)
    site.run(
        """
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Artifact
        assert Artifact(len).finalize_loading(None) is None
        """,
        AOTGAUDI_WITNESS_REPAIRS="vllm.finalize-loading",
    )

    (repair,) = guest.events("repair")
    assert (repair["id"], repair["applied"]) == ("vllm.finalize-loading", True)


def test_a_torch_that_needs_no_repair_keeps_its_own(guest: Guest, site: Site) -> None:
    site.add(
        AOT_TYPES,
        ARTIFACT.replace(
            "class SerializableCallable: pass",
            "class SerializableCallable:\n        def finalize_loading(self, config): return 7",
        ),
    )
    site.run(
        """
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Artifact
        assert Artifact(len).finalize_loading(None) == 7
        """,
        AOTGAUDI_WITNESS_REPAIRS="vllm.finalize-loading",
    )

    (repair,) = guest.events("repair")
    assert repair["applied"] is False
    assert "itself" in repair["why"]


def test_nothing_is_repaired_unasked_and_unknown_repairs_are_told(guest: Guest, site: Site) -> None:
    site.add(AOT_TYPES, ARTIFACT)
    site.run(
        """
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Artifact
        assert "finalize_loading" not in vars(Artifact)
        """,
        AOTGAUDI_WITNESS_REPAIRS="vllm.other",
    )

    assert [(event["id"], event["applied"]) for event in guest.events("repair")] == [("vllm.other", False)]


COMPILE_FX = """
    def fx_codegen_and_compile(gm, **kwargs): return "code"
    def compile_fx(gm): return fx_codegen_and_compile(gm, graph_id=3)
"""


def test_code_that_inductor_generates_is_told(guest: Guest, site: Site) -> None:
    site.add("torch._inductor.compile_fx", COMPILE_FX)
    site.run("from torch._inductor.compile_fx import compile_fx; assert compile_fx(1) == 'code'")

    (generated,) = guest.events("generate")
    assert (generated["what"], generated["name"]) == ("inductor", "graph 3")


def test_code_that_inductor_generates_is_refused_where_nothing_may_compile(guest: Guest, site: Site) -> None:
    guest.state.write_text("l")
    site.add("torch._inductor.compile_fx", COMPILE_FX)

    done = guest.attempt(site.path + "from torch._inductor.compile_fx import compile_fx; compile_fx(1)")

    assert "CompileForbidden: aotgaudi: refused: code generation by Inductor: graph 3" in done.stderr
    assert [event["e"] for event in guest.events()][-3:] == ["generate", "refused", "bye"]


CALLBACK = """
    class Handler:
        def __init__(self): self.start_callbacks = []
        def register_start_callback(self, callback): self.start_callbacks.append(callback)
    callback_handler = Handler()
"""


@pytest.mark.parametrize("arguments", ["", "type('Args', (), {'compile_id': '0/0'})()"])
def test_a_trace_is_told_however_torch_calls_back(guest: Guest, site: Site, arguments: str) -> None:
    site.add("torch._dynamo.callback", CALLBACK)
    site.run(
        f"""
        from torch._dynamo.callback import callback_handler
        for callback in callback_handler.start_callbacks: callback({arguments})
        """
    )

    (trace,) = guest.events("trace")
    assert trace["name"] == ("0/0" if arguments else "unknown")


NUMBA = """
    class Listener: pass
    registered = {}
    def register(kind, listener): registered[kind] = listener
"""
DRAFT = """
    import numba.core.event as event
    def draft(tokens): pass
    told = type("Event", (), {"data": {"dispatcher": type("D", (), {"py_func": draft}), "args": ("int32", "str")}})
    listener = event.registered["numba:compile"]
    listener.on_start(told)
    """


def test_a_function_that_numba_compiles_is_told(guest: Guest, site: Site) -> None:
    site.add("numba.core.event", NUMBA)
    guest.state.write_text("l")  # No file could have spared it, so it is not refused.
    nested = "inner = type('Event', (), {'data': {}}); listener.on_start(inner); listener.on_end(inner)"
    site.run(textwrap.dedent(DRAFT) + nested)

    (compiled,) = guest.events("compile")
    assert (compiled["what"], compiled["name"]) == ("numba", "__main__.draft(int32, str)")


TRITON = """
    class compilation: listener = None
"""


def test_a_kernel_that_triton_compiles_is_told_and_one_from_its_cache_is_not(
    guest: Guest, site: Site
) -> None:
    site.add("triton.knobs", TRITON)
    site.run(
        """
        import triton.knobs
        listener = triton.knobs.compilation.listener
        times = type("Times", (), {"total": 2_500_000})()
        listener(src=None, metadata={"name": "add"}, metadata_group={}, times=times, cache_hit=True)
        listener(src=None, metadata={"name": "mul"}, metadata_group={}, times=times, cache_hit=False)
        """
    )

    (compiled,) = guest.events("compile")
    assert (compiled["what"], compiled["name"], compiled["seconds"]) == ("triton", "mul", 2.5)


def test_whoever_listened_to_triton_before_still_does(guest: Guest, site: Site) -> None:
    site.add(
        "triton.knobs", "heard = []\nclass compilation:\n    def listener(**kwargs): heard.append(kwargs)\n"
    )
    site.run(
        """
        import triton.knobs
        triton.knobs.compilation.listener(src=1, cache_hit=False)
        assert triton.knobs.heard == [{"src": 1, "cache_hit": False}]
        """
    )

    assert len(guest.events("compile")) == 1


TILELANG = """
    class JITKernel:
        def __init__(self, function, from_database=False):
            if not from_database: self.adapter = self._compile_and_create_adapter(function, [])
        def _compile_and_create_adapter(self, tilelang_func, out_idx): return "adapter"
"""


def test_a_kernel_that_tilelang_compiles_is_told(guest: Guest, site: Site) -> None:
    site.add("tilelang.jit.kernel", TILELANG)
    site.run(
        """
        from tilelang.jit.kernel import JITKernel
        function = type("F", (), {"attrs": {"global_symbol": "mhc_pre"}})()
        assert JITKernel(function).adapter == "adapter"
        JITKernel(function, from_database=True); JITKernel(object())
        """
    )

    assert [event["name"] for event in guest.events("compile")] == ["mhc_pre", "a kernel"]


METRICS = """
    class Metric:
        def __init__(self): self.number, self.asked = 0, 0
        def process(self): self.asked += 1
        def stats(self):
            return {"TotalNumber": self.number, "RecipeHit": {"1": self.number, "-1": self.number}, "RecipeMiss": {"1": 1}}
    metrics = {"graph_compilation": Metric(), "recipe_cache": Metric()}
    def metric_global(name): return metrics.get(name)
"""


def test_graphs_that_a_gaudi_compiles_are_told_and_the_flush_is_called(guest: Guest, site: Site) -> None:
    site.add("habana_frameworks.torch.hpu.metrics", METRICS)
    site.add(
        "habana_frameworks.torch.utils.debug", "num = 0\ndef _flush_disk_cache():\n    global num; num += 1\n"
    )
    site.run(
        """
        import habana_frameworks.torch.hpu.metrics as metrics
        metrics.metrics["graph_compilation"].number = 2; metrics.metrics["recipe_cache"].number = 3
        say("f")
        import habana_frameworks.torch.utils.debug as debug
        assert debug.num == 1
        """
    )

    (compiled,) = guest.events("compile")
    assert (compiled["what"], compiled["name"]) == ("hpu", "2 graphs")
    assert last_hooks(guest)["habana.metrics"] is True
    kinds = [event["e"] for event in guest.events()]
    assert kinds.index("counters") < kinds.index("state")
    assert guest.events("counters")[-1]["values"]["hpu.recipe_hits"] == 2
    loaded = [(event["what"], event["name"]) for event in guest.events("loaded")]
    assert loaded == [("recipe", str(2**64 - 1))]  # What was missed before was compiled here.


def test_graphs_that_a_live_gaudi_compiles_are_told_with_the_requests_of_the_step(
    guest: Guest, site: Site
) -> None:
    site.add("habana_frameworks.torch.hpu.metrics", METRICS)
    site.run(
        f"""
        import time, habana_frameworks.torch.hpu.metrics as metrics
        from types import SimpleNamespace as Of
        metric = metrics.metrics["graph_compilation"]
        def wait():
            asked = metric.asked
            while metric.asked < asked + 2: time.sleep(0.01)
        class Asked:
            def __init__(self, logprobs=None): self.max_tokens, self.logprobs = 4, logprobs
        class Runner:
            requests = {{"cmpl-7-0": Of(sampling_params=Asked(2), prompt_token_ids=[1, 2])}}
            def sample_tokens(self):
                scheduler_output = Of(num_scheduled_tokens={{"cmpl-7-0": 2}}, scheduled_new_reqs=[])
                metric.number = 1; wait()
        open({str(guest.state)!r}, "w").write("v"); wait()
        Runner().sample_tokens()
        """
    )

    (compiled,) = guest.events("compile")
    body = {"max_tokens": 4, "logprobs": 2}
    assert compiled["requests"] == [{"id": "cmpl-7-0", "num_prompt_tokens": 2, "body": body}]


def test_a_gaudi_that_cannot_flush_is_a_fault_and_the_state_is_not_acknowledged(
    guest: Guest, site: Site
) -> None:
    site.add("habana_frameworks.torch.hpu.metrics", METRICS)
    site.add("habana_frameworks.torch.utils.debug", "")
    site.run(
        """
        import time, habana_frameworks.torch.hpu.metrics
        say("f", "fault"); time.sleep(0.6)
        """
    )

    (fault,) = guest.events("fault")
    assert "cannot be told" in fault["error"]
    assert guest.events("state") == []


def test_modules_that_lack_what_is_hooked_are_not_watched(guest: Guest, site: Site) -> None:
    lacking = {
        "vllm.counters": ("vllm.compilation.counter", "class C: num_compiles = 0\ncompilation_counter = C()"),
        "numba.events": ("numba.core.event", "Listener = None"),
        "triton.listener": ("triton.knobs", "class compilation: pass"),
        "habana.metrics": ("habana_frameworks.torch.hpu.metrics", "def metric_global(name): return None"),
    }
    for module, source in lacking.values():
        site.add(module, source)
    site.run("import " + ", ".join(module for module, _ in lacking.values()))

    assert {name for name, status in last_hooks(guest).items() if status is False} == lacking.keys()
