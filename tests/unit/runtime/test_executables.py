"""Bound programs over fake units: plain Python objects in place of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from aotgaudi.entries import DecodeEntry, DefragEntry, SamplerEntry
from aotgaudi.errors import ManifestError
from aotgaudi.graphs.program import Call, Program, TensorSpec
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork


class Value:
    """Stands for a tensor; can be referred to weakly."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


@dataclass
class FakeUnit:
    """Names its outputs after its inputs, and remembers what it was given."""

    name: str
    num_outputs: int = 1
    given: list[list[str]] = field(default_factory=list)

    @property
    def run(self) -> Callable[[Sequence[Any]], list[Any]]:
        return self._run

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        names = [str(value) for value in inputs]
        self.given.append(names)
        return [Value(f"{self.name}{n}({','.join(names)})") for n in range(self.num_outputs)]


def program(
    calls: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    outputs: Sequence[str],
    inputs: Sequence[str] = ("x",),
) -> Program:
    return Program(
        inputs=tuple(TensorSpec(name=name, shape=(1,), dtype="int64") for name in inputs),
        weights=(),
        caches=(),
        calls=tuple(Call(unit=unit, inputs=tuple(args), outputs=tuple(outs)) for unit, args, outs in calls),
        outputs=tuple(outputs),
    )


TENSORS: dict[str, Any] = {name: Value(name) for name in ("weight:w", "const:c", "kv:0", "kv:1")}
TWO_LAYERS = program(
    [
        ("layer", ["step:x", "weight:w", "kv:0", "const:c"], ["h.0"]),
        ("layer", ["tmp:h.0", "weight:w", "kv:1", "const:c"], ["h.1"]),
        ("head", ["tmp:h.1", "step:n"], ["logits", "extra"]),
    ],
    ["logits"],
    inputs=("x", "n"),
)


def run(bound: BoundProgram, *names: str) -> list[str]:
    return [str(value) for value in bound.run([Value(name) for name in names])]  # type: ignore[misc]


def test_inputs_weights_caches_constants_and_results_reach_the_calls_that_bind_them() -> None:
    units = {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}

    outputs = run(BoundProgram(TWO_LAYERS, units, TENSORS), "x", "n")

    first = "layer0(x,weight:w,kv:0,const:c)"
    second = f"layer0({first},weight:w,kv:1,const:c)"
    assert units["layer"].given == [
        ["x", "weight:w", "kv:0", "const:c"],
        [first, "weight:w", "kv:1", "const:c"],
    ]
    assert outputs == [f"head0({second},n)"]


def test_outputs_come_in_the_programs_order() -> None:
    bound = BoundProgram(
        program([("u", ["step:x"], ["a", "b", "c"])], ["c", "a", "a"]), {"u": FakeUnit("u", 3)}, {}
    )

    assert run(bound, "x") == ["u2(x)", "u0(x)", "u0(x)"]


def test_a_second_run_sees_nothing_of_the_first() -> None:
    units = {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}
    bound = BoundProgram(TWO_LAYERS, units, TENSORS)

    run(bound, "x", "n")

    assert "y" in run(bound, "y", "m")[0]
    assert not [
        name for given in units["layer"].given[2:] for name in given if "x" in name.replace("weight", "")
    ]


def test_a_name_that_is_written_again_has_the_newest_value() -> None:
    calls = [("u", ["step:x"], ["a"]), ("u", ["tmp:a"], ["a"])]

    assert run(BoundProgram(program(calls, ["a"]), {"u": FakeUnit("u")}, {}), "x") == ["u0(u0(x))"]


def test_inputs_and_results_are_let_go_after_a_run_and_weights_are_kept() -> None:
    bound = BoundProgram(TWO_LAYERS, {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}, TENSORS)
    value, other = Value("x"), Value("n")
    seen = [weakref.ref(value), weakref.ref(other)]

    outputs = bound.run([value, other])  # type: ignore[list-item]
    seen += [weakref.ref(output) for output in outputs]
    del value, other, outputs

    assert [ref() for ref in seen] == [None, None, None]
    assert run(bound, "x", "n")


def test_a_program_without_outputs_gives_none() -> None:
    bound = BoundProgram(
        program([("swap", ["kv:0", "step:x"], ["0"])], []), {"swap": FakeUnit("swap")}, TENSORS
    )

    assert run(bound, "x") == []


@pytest.mark.parametrize(
    "binding", ["weight:absent", "const:absent", "kv:7", "tmp:later", "step:absent", "nonsense"]
)
def test_a_binding_to_nothing_is_refused_when_the_program_is_bound(binding: str) -> None:
    with pytest.raises(ManifestError, match=f"binds '{binding}'"):
        BoundProgram(program([("u", [binding], ["a"])], []), {"u": FakeUnit("u")}, TENSORS)


def test_a_result_is_bound_only_after_it_is_made() -> None:
    calls = [("u", ["tmp:b"], ["a"]), ("u", ["step:x"], ["b"])]

    with pytest.raises(ManifestError, match="binds 'tmp:b'"):
        BoundProgram(program(calls, []), {"u": FakeUnit("u")}, {})


def test_an_output_that_no_call_makes_is_refused() -> None:
    with pytest.raises(ManifestError, match="binds 'tmp:z'"):
        BoundProgram(program([], ["z"]), {}, {})


def test_a_unit_that_gives_another_number_of_outputs_is_an_error() -> None:
    bound = BoundProgram(program([("u", ["step:x"], ["a", "b"])], ["a"]), {"u": FakeUnit("u", 1)}, {})

    with pytest.raises(ValueError, match="zip"):
        run(bound, "x")


GREEDY = SamplerEntry(2, 0.0, 1.0, 0, batch_changed=True)
RANDOM = SamplerEntry(2, 1.0, 1.0, 0, batch_changed=True)
FILTERED = SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True)
MIN_P = SamplerEntry(2, 0.7, 1.0, 0, batch_changed=True, min_p=0.1)
PENALISED = SamplerEntry(2, 0.7, 1.0, 0, batch_changed=True, frequency_penalty=0.5)
LOGGED = SamplerEntry(2, 0.7, 0.9, 0, batch_changed=True, presence_penalty=0.5, num_logprobs=3)


def table_of(*entries: SamplerEntry) -> ExecutableTable:
    table = ExecutableTable()
    table.declare_samplers(entries)
    return table


@pytest.mark.parametrize(
    ("declared", "wanted", "found"),
    [
        ((GREEDY, RANDOM, FILTERED), SamplerSignature(SamplerWork.GREEDY), GREEDY),
        ((GREEDY, RANDOM, FILTERED), SamplerSignature(SamplerWork.RANDOM), RANDOM),
        ((FILTERED, RANDOM), SamplerSignature(SamplerWork.GREEDY), RANDOM),
        ((FILTERED,), SamplerSignature(SamplerWork.GREEDY), FILTERED),
        ((GREEDY, FILTERED), SamplerSignature(SamplerWork.RANDOM), FILTERED),
        ((LOGGED, MIN_P, PENALISED), SamplerSignature(SamplerWork.RANDOM), PENALISED),
        ((LOGGED, MIN_P, PENALISED), SamplerSignature(logprobs=True), LOGGED),
        ((MIN_P, PENALISED), SamplerSignature(SamplerWork.FILTERED), MIN_P),
    ],
)
def test_the_cheapest_sampler_that_is_able_serves(
    declared: tuple[SamplerEntry, ...], wanted: SamplerSignature, found: SamplerEntry
) -> None:
    assert table_of(*declared).sampler(2, wanted) == found


@pytest.mark.parametrize(
    ("batch_size", "wanted"),
    [
        (2, SamplerSignature(SamplerWork.FILTERED)),
        (2, SamplerSignature(SamplerWork.RANDOM)),
        (3, SamplerSignature(SamplerWork.GREEDY)),
    ],
)
def test_no_sampler_that_does_less_or_has_another_size_serves(
    batch_size: int, wanted: SamplerSignature
) -> None:
    with pytest.raises(ManifestError, match=f"{str(wanted)!r} for batch size {batch_size}; add a setting"):
        table_of(GREEDY).sampler(batch_size, wanted)


def test_the_first_sampler_declared_for_a_signature_is_used() -> None:
    other = SamplerEntry(2, 0.3, 0.95, 20, batch_changed=False)

    assert table_of(FILTERED, other).sampler(2, SamplerSignature(SamplerWork.FILTERED)) == FILTERED


def test_sampler_sizes_ascend_each_once() -> None:
    sizes = [4, 1, 0, 4, 2]

    assert table_of(*(SamplerEntry(n, 0.0, 1.0, 0, batch_changed=True) for n in sizes)).sampler_sizes() == (
        1,
        2,
        4,
    )


def test_an_entry_is_warm_once_it_is_added() -> None:
    table, bound = ExecutableTable(), BoundProgram(program([], []), {}, {})

    table.add(DecodeEntry(1, 1, 1), bound)

    assert table.get(DecodeEntry(1, 1, 1)) is bound
    assert DecodeEntry(1, 1, 1) in table
    assert len(table) == 1
    assert table.get(DefragEntry(1)) is None
    assert DefragEntry(1) not in table


def test_a_head_runs_alone_on_what_the_other_calls_give() -> None:
    units = {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}
    bound = BoundProgram(TWO_LAYERS, units, TENSORS)
    inputs: Any = [Value("x"), Value("n")]

    hidden = bound.run_trunk(inputs)

    assert bound.has_head
    assert units["head"].given == []
    assert [str(bound.run_head(hidden, inputs))] == run(bound, "x", "n")
    assert str(bound.run_head(Value("h"), inputs)) == "head0(h,n)"  # type: ignore[arg-type]


def test_halves_keep_no_result() -> None:
    bound = BoundProgram(TWO_LAYERS, {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}, TENSORS)
    inputs: Any = [Value("x"), Value("n")]

    hidden = bound.run_trunk(inputs)
    held = weakref.ref(hidden)
    bound.run_head(hidden, inputs)
    del hidden, inputs

    assert held() is None


@pytest.mark.parametrize(
    "calls",
    [
        [("u", ["step:x"], ["a"])],
        [("u", ["step:x"], ["a"]), ("u", ["tmp:a"], ["b"]), ("u", ["tmp:a", "tmp:b"], ["c"])],
        [("u", ["step:x"], ["c"]), ("u", ["tmp:c"], ["b"])],
        [("u", ["step:x"], ["c"]), ("u", ["step:x"], ["b"])],
    ],
)
def test_a_last_call_that_takes_more_or_gives_less_is_no_head(
    calls: list[tuple[str, list[str], list[str]]],
) -> None:
    last = "a" if len(calls) == 1 else "c"

    assert not BoundProgram(program(calls, [last]), {"u": FakeUnit("u")}, {}).has_head


def test_each_batch_size_has_a_warm_head() -> None:
    table = ExecutableTable()
    bound = BoundProgram(TWO_LAYERS, {"layer": FakeUnit("layer"), "head": FakeUnit("head", 2)}, TENSORS)
    for entry in (DecodeEntry(4, 1, 8), DecodeEntry(1, 1, 2), DecodeEntry(4, 1, 4), DefragEntry(4)):
        table.add(entry, bound)

    assert table.heads() == {1: DecodeEntry(1, 1, 2), 4: DecodeEntry(4, 1, 4)}
    assert list(table.heads()) == [1, 4]
