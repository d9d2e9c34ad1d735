"""Whether steps call the hyper-connections of their classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.mhc_splits import MHC_RULES, StepSplits
from aotgaudi.bundle.programs import split_problems
from aotgaudi.entries import DecodeEntry, Entry, MhcEntry, PromptEntry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from tests.specs import spec_of

NUM_LAYERS = 3


def spec_with(rule: str, num_sms: int, hidden_size: int = 512, **limits: int) -> BuildSpec:
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 100_000,
    }
    model = {"name": "m", "dtype": "float32", "config": config}
    return spec_of(model=model, limits=limits, mhc={"rule": rule}, target={"num_sms": num_sms})


def program_of(*units: str) -> Program:
    return Program(
        inputs=(),
        weights=(),
        caches=(),
        calls=tuple(Call(unit=unit, inputs=(), outputs=(f"{n}.0",)) for n, unit in enumerate(units)),
        outputs=(),
    )


def unit_of(n_splits: int) -> str:
    return f"{n_splits:064x}"


def step_of(n_splits: int) -> Program:
    layers = ["layer", "hc", "moe", "hc"] * NUM_LAYERS
    return program_of("embedding", *(unit_of(n_splits) if unit == "hc" else unit for unit in layers), "head")


@dataclass(frozen=True)
class Built:
    spec: BuildSpec
    programs: dict[Entry, Program]

    @classmethod
    def of(cls, spec: BuildSpec) -> Built:
        """As a build makes them: a step's class follows from its token count."""
        splits = StepSplits.of(spec)
        assert splits is not None
        programs: dict[Entry, Program] = {}
        for entry in Manifest.of(spec).entries:
            if isinstance(entry, MhcEntry):
                programs[entry] = program_of(unit_of(entry.n_splits))
            elif isinstance(entry, (PromptEntry, DecodeEntry)):
                programs[entry] = step_of(splits.of_entry(entry))
        return cls(spec, programs)

    def problems(self, **changes: Any) -> list[tuple[Entry, str]]:
        return list(split_problems(self.spec, {**self.programs, **changes.get("programs", {})}))


LIMITS = {"max_num_batched_tokens": 160, "max_model_len": 192, "num_blocks": 14}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(set(MHC_RULES) - {"sglang-deepgemm-off"})),
    st.integers(1, 200),
    st.sampled_from([64, 500, 4096]),
    st.integers(16, 700),
    st.integers(16, 700),
    st.data(),
)
def test_every_step_calls_the_unit_of_its_token_counts_class_and_any_other_unit_is_found(
    rule: str, num_sms: int, hidden_size: int, max_model_len: int, most_tokens: int, data: st.DataObject
) -> None:
    limits = {"max_model_len": max_model_len, "max_num_batched_tokens": most_tokens, "num_blocks": 64}
    built = Built.of(spec_with(rule, num_sms, hidden_size, **limits))
    splits = StepSplits.of(built.spec)
    assert splits is not None
    warm = {(entry.n_splits, entry.sublayer) for entry in built.programs if isinstance(entry, MhcEntry)}
    steps = [entry for entry in built.programs if isinstance(entry, (PromptEntry, DecodeEntry))]

    assert built.problems() == []
    for tokens in range(1, max(entry.num_tokens for entry in steps) + 1):
        assert {(splits.n_splits(tokens), "attn"), (splits.n_splits(tokens), "ffn")} <= warm

    step = data.draw(st.sampled_from(steps))
    others = sorted({n for n, _ in warm} - {splits.of_entry(step)})
    if others:
        other = data.draw(st.sampled_from(others))
        (found,) = built.problems(programs={step: step_of(other)})
        assert found[0] == step
        assert f"{step} has the hyper-connections of {splits.of_entry(step)} partial sums" in found[1]
        assert f"is of {other}" in found[1]


def test_a_step_that_calls_an_unknown_unit_lacks_calls_of_its_class() -> None:
    built = Built.of(spec_with("sglang-pr25810", 4, **LIMITS))
    step = next(entry for entry in built.programs if isinstance(entry, DecodeEntry))

    ((entry, problem),) = built.problems(programs={step: step_of(99)})

    assert entry == step
    assert problem.endswith("it calls the unit of its class 0 times, should be 6")


@pytest.mark.parametrize("sublayer", ["attn", "ffn"])
def test_entries_of_one_class_that_name_two_units_are_a_problem_of_its_steps(sublayer: str) -> None:
    built = Built.of(spec_with("one", 4, **LIMITS))
    mhc = next(e for e in built.programs if isinstance(e, MhcEntry) and e.sublayer == sublayer)

    assert built.problems(programs={mhc: program_of(unit_of(7))})


def test_of_a_class_without_entries_and_of_other_models_nothing_is_said() -> None:
    built = Built.of(spec_with("one", 4, **LIMITS))
    steps = {entry: step for entry, step in built.programs.items() if not isinstance(entry, MhcEntry)}

    assert list(split_problems(built.spec, steps)) == []
    assert list(split_problems(spec_of(), built.programs)) == []
