"""Programs that run as one foreign call: same results, other threads go on, nothing is kept."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from aotgaudi.backends.base import Executable, Plan, Step, Unit
from aotgaudi.backends.inductor import native
from aotgaudi.backends.inductor.compiler import InductorCompiler
from aotgaudi.backends.inductor.probe import probe
from aotgaudi.backends.inductor.runtime import InductorExecutable, InductorRuntime
from aotgaudi.digest import Key
from aotgaudi.errors import ManifestError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.program import Call, Program, TensorSpec
from aotgaudi.runtime.executables import BoundProgram

SIZE, NUM_PRODUCTS = 640, 24


class Layer(torch.nn.Module):
    """Takes long enough to be watched; writes to its second input."""

    def forward(
        self, x: torch.Tensor, seen: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(NUM_PRODUCTS):
            x = torch.tanh(x @ w)
        seen.add_(1)
        return x, x.sum(-1)


def example() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    return [x, torch.zeros(2), w / SIZE**0.5]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> tuple[InductorRuntime, Executable]:
    target = probe("native")
    graph = torch.export.export(Layer(), tuple(example()), strict=False).graph
    unit = Unit(to_text(graph), Key.of([("text", "x")]), "layer")
    runtime = InductorRuntime(target)
    return runtime, runtime.load(
        InductorCompiler(target).compile(unit, tmp_path_factory.mktemp("unit")).files
    )


TWO = Program(
    inputs=(TensorSpec(name="x", shape=(SIZE, SIZE), dtype="float32"),),
    weights=(),
    caches=(),
    calls=(
        Call(unit="layer", inputs=("step:x", "kv:0", "weight:w"), outputs=("a.0", "a.1")),
        Call(unit="layer", inputs=("tmp:a.0", "kv:0", "weight:w"), outputs=("b.0", "b.1")),
    ),
    outputs=("b.1", "a.0"),
)


Loaded = tuple[InductorRuntime, Executable]


def bound(loaded: Loaded, cache: torch.Tensor, *, joined: bool) -> BoundProgram:
    runtime, unit = loaded
    tensors = {"kv:0": cache, "weight:w": example()[2]}
    return BoundProgram(TWO, {"layer": unit}, tensors, *([runtime.join] if joined else []))


def test_a_program_gives_what_its_calls_give(load: Loaded) -> None:
    x, seen, w = example()
    programs = [bound(load, seen, joined=joined) for joined in (True, False)]

    (sums, first), (sums_by_call, first_by_call) = (program.run([x]) for program in programs)
    again = programs[0].run([x])

    assert torch.equal(sums, sums_by_call)
    assert torch.equal(first, first_by_call)
    assert torch.equal(again[0], sums)
    assert seen.tolist() == [6, 6]
    torch.testing.assert_close(first, Layer()(x, torch.zeros(2), w)[0], atol=1e-4, rtol=1e-3)
    assert sums.shape == (SIZE,)


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        (("step:x", "kv:0"), ("a.0", "a.1"), "2 inputs and 2 outputs, it has 3 and 2"),
        (("step:x", "kv:0", "weight:w"), ("a.0",), "3 inputs and 1 outputs, it has 3 and 2"),
    ],
)
def test_a_call_of_another_arity_is_refused_before_it_runs(
    load: Loaded, inputs: tuple[str, ...], outputs: tuple[str, ...], reason: str
) -> None:
    """The code of a unit reads as many handles as it was compiled for."""
    runtime, unit = load
    call = Call(unit="layer", inputs=inputs, outputs=outputs)
    program = TWO.model_copy(update={"calls": (call,), "outputs": ("a.0",)})

    with pytest.raises(ManifestError, match=reason):
        BoundProgram(
            program, {"layer": unit}, {"kv:0": torch.zeros(2), "weight:w": example()[2]}, runtime.join
        )


def test_other_threads_go_on_while_a_program_runs(load: Loaded) -> None:
    program, is_inside, is_over = bound(load, torch.zeros(2), joined=True), [False], threading.Event()
    last_seen = [0.0]

    def watch() -> None:
        while not is_over.is_set():
            if is_inside[0]:
                last_seen[0] = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    x = example()[0]
    try:
        started, is_inside[0] = time.perf_counter(), True
        program.run([x])
        ended, is_inside[0] = time.perf_counter(), False
    finally:
        is_over.set()
        watcher.join()

    assert (
        last_seen[0] > (started + ended) / 2
    )  # Else its last turn was at most a switch interval before the call.


def test_a_unit_that_fails_raises_and_keeps_nothing(load: Loaded, capfd: pytest.CaptureFixture[str]) -> None:
    unit = load[1]
    x, seen, w = example()
    assert isinstance(unit, InductorExecutable)
    assert unit.native is not None
    plan = Plan([None, seen, None, None], 1, [Step(unit, (0, 1), (2, 3))], (2,), (0, 2, 3))
    run = native.NativeProgram(
        plan, [native.Call(unit.native, (0, 1), (2, 3))]
    ).run  # `join` refuses it before.

    for _ in range(2):
        with pytest.raises(RuntimeError, match="standard error"):
            run([x])

    assert "inputs" in capfd.readouterr().err
    assert torch.equal(unit.run([x, seen, w])[0], bound(load, seen, joined=True).run([x])[1])


def test_a_program_lets_go_of_what_it_was_bound_to(load: Loaded) -> None:
    cache = torch.zeros(2)
    kept = weakref.ref(cache.untyped_storage())
    program = bound(load, cache, joined=True)
    x, _, _ = example()
    given = weakref.ref(x)
    outputs = program.run([x])
    found = weakref.ref(outputs[0].untyped_storage())
    del x
    assert given() is None
    assert found() is not None
    del outputs
    assert found() is None
    del cache
    assert kept() is not None

    del program

    assert kept() is None


def test_units_of_earlier_versions_run_call_by_call(
    load: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, unit = load
    monkeypatch.setattr("aotgaudi.backends.inductor.native.load_unit", lambda path: None)
    monkeypatch.setattr(
        torch._C._aoti, "AOTIModelContainerRunnerCpu", lambda path, number: unit, raising=True
    )
    old = InductorExecutable(tmp_path)

    assert old.run == unit.run
    assert runtime.join(Plan([None], 1, [Step(old, (0,), (0,))], (0,), (0,))) is None
