"""Every factor, flipped alone: a miss that `explain` names, or a hit, for what is excluded by name and with a reason."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aotgaudi
from aotgaudi.backends import fake
from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor import probe as inductor_probe
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import COMPILE_FLAGS
from aotgaudi.compile import keys
from aotgaudi.compile.keys import LIMITS_EXCLUDED, SPEC_EXCLUDED, ProgramRow, UnitSource, record, unit_key
from aotgaudi.compile.why import Change, Finding
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.bucketing import BucketingSpec, SlidingSpec
from aotgaudi.spec.build_spec import BuildSpec, LoraSpec, ParallelSpec
from aotgaudi.spec.model import CONFIG_KEYS_EXCLUDED
from aotgaudi.spec.quantization import QuantizationSpec
from aotgaudi.store.store import Store
from tests.specs import spec_tables
from tests.unit.compile.explaining import built, compiled, findings

CONFIGS = Path(__file__).parents[3] / "manifests" / "configs"
ENTRIES: tuple[Entry, ...] = (
    PromptEntry(2, 32, 4),
    DecodeEntry(2, 1, 4),
    SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True),
    DefragEntry(8),
    MhcEntry(64, 2, "attn"),
)
LABELS = (("layer a", "head b"), ("layer a",), ("sampler c",), ("swap d",), ("mhc e",))
*_, HIGHEST = ISA_LEVELS.values()
TARGET = Target(
    backend="cpu",
    machine="x86_64",
    isa=HIGHEST.features,
    toolchain={
        "torch": "2.13",
        "compiler": "g++ 12",
        "linker": "ld 2.40",
        "libc": "glibc 2.36",
        "compile_code": "0" * 64,
    },
    flags={
        **COMPILE_FLAGS,
        "aotgaudi.isa": HIGHEST.name,
        "aotgaudi.compiler_flags": " ".join(HIGHEST.compiler_flags),
        "cpp.simdlen": str(HIGHEST.simdlen),
    },
)


def config_of(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return value


def spec_of(config: dict[str, Any]) -> BuildSpec:
    spec = BuildSpec.model_validate(
        spec_tables(
            model={"name": "m", "config": config},
            limits={
                "max_num_seqs": 4,
                "max_num_prefill_seqs": 2,
                "max_num_batched_tokens": 64,
                "num_blocks": 32,
            },
        )
    )
    quantization = QuantizationSpec(method="inc", kv_cache_dtype="fp8_inc", config_sha256="a" * 64)
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"quantization": quantization}),
            "bucketing": BucketingSpec(sliding=SlidingSpec()),
            "parallel": ParallelSpec(pipeline_parallel_size=2),
            "lora": LoraSpec(),
        }
    )


SPEC = spec_of(config_of("smollm2-135m.json"))
Step = typing.Union[str, int]


def leaves(value: SpecValue, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """The path of every field of every table, and of the tables in lists."""
    for name in type(value).model_fields:
        field = getattr(value, name)
        if isinstance(field, SpecValue):
            yield from leaves(field, (*path, name))
            continue
        yield (*path, name)
        if isinstance(field, tuple) and field and isinstance(field[0], SpecValue):
            yield from leaves(field[0], (*path, name, 0))


def other_value(table: SpecValue, name: str) -> Any:
    """A value of the same type that differs: another of the field's names, or one more."""
    value, annotation = getattr(table, name), type(table).model_fields[name].annotation
    choices = [v for part in (annotation, *typing.get_args(annotation)) for v in typing.get_args(part)]
    names = [v for v in choices if isinstance(v, (str, int)) and v != value]
    if names:
        return names[0]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case tuple():
            return value[:-1] if value else ("1x1",)
        case None:
            parts = [part for part in typing.get_args(annotation) if hasattr(part, "model_fields")]
            tables = [
                part for part in parts if not any(one.is_required() for one in part.model_fields.values())
            ]
            return tables[0]() if tables else _present(str(annotation))
    raise AssertionError(f"{name}: no other value for {value!r}")


def _present(annotation: str) -> Any:
    if "tuple" in annotation:
        return (7,)
    return "x" if "str" in annotation else "bool" in annotation or 7


def changed(value: SpecValue, path: tuple[Step, ...]) -> Any:
    name, *rest = path
    assert isinstance(name, str)
    if not rest:
        return value.model_copy(update={name: other_value(value, name)})
    inner = getattr(value, name)
    if isinstance(rest[0], int):
        items = list(inner)
        items[rest[0]] = changed(items[rest[0]], tuple(rest[1:]))
        return value.model_copy(update={name: tuple(items)})
    return value.model_copy(update={name: changed(inner, tuple(rest))})


def dotted(path: tuple[Step, ...]) -> str:
    return ".".join(map(str, path))


PATHS = [path for path in leaves(SPEC) if path != ("model", "config")]
IN_KEY = {
    "model.dtype": "model.model.dtype",
    "limits.block_size": "limits.block_size",
    "target.execution_mode": "spec.target.execution_mode",
    **{
        f"model.quantization.{name}": f"model.model.quantization.{name}"
        for name in QuantizationSpec.model_fields
    },
    **{f"parallel.{name}": f"spec.parallel.{name}" for name in ParallelSpec.model_fields},
    **{f"lora.{name}": f"spec.lora.{name}" for name in LoraSpec.model_fields},
}
"""The fields of a spec that make other programs of the same entries, and what `explain` calls them."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of `ENTRIES` built, under `SPEC` and `TARGET`."""
    opened = Store.open(tmp_path_factory.mktemp("mutation") / "store")
    built(opened, SPEC, ENTRIES, LABELS, TARGET)
    return opened


def states(found: tuple[Finding, ...]) -> set[str]:
    return {finding.state for finding in found}


def names(found: tuple[Finding, ...]) -> list[set[str]]:
    return [{change.name for change in finding.changes} for finding in found]


def test_without_a_change_everything_is_a_hit(store: Store) -> None:
    assert states(findings(store, SPEC, ENTRIES, TARGET)) == {"warm"}


def test_every_field_of_the_spec_is_a_named_miss_or_excluded_with_a_reason(store: Store) -> None:
    wrong = []
    for path in PATHS:
        other, name = changed(SPEC, path), IN_KEY.get(dotted(path))
        found = findings(store, other, ENTRIES, TARGET)
        if name is None:
            is_right = states(found) == {"warm"} and reason_of(path)
        else:
            is_right = states(found) == {"changed"} and names(found) == [{name}] * len(ENTRIES)
        if other == SPEC or not is_right:
            wrong.append(dotted(path))

    assert wrong == []


def reason_of(path: tuple[Step, ...]) -> str:
    if path == ("model", "name"):
        return SPEC_EXCLUDED["model"]
    if path[0] == "limits":
        return LIMITS_EXCLUDED[str(path[1])]
    return SPEC_EXCLUDED.get(str(path[0])) or SPEC_EXCLUDED[dotted(path[:2])]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_the_key_that_shares_what_is_common_is_the_hash_of_all_components(entry: Entry) -> None:
    shared = keys.ProgramKeys(SPEC, TARGET)

    assert shared.hex_of(entry) == Key.of(shared.of(entry).components).hex


def test_the_walk_has_every_table_and_what_is_excluded_exists() -> None:
    tops = {str(path[0]) for path in PATHS}
    tables = {dotted(path[:2]) for path in PATHS}

    assert tops == set(BuildSpec.model_fields)
    assert {name for name in SPEC_EXCLUDED if "." not in name} <= tops
    assert {name for name in SPEC_EXCLUDED if "." in name} <= tables
    assert set(IN_KEY) <= set(map(dotted, PATHS))
    assert len(PATHS) > 70


def test_a_field_that_is_new_to_the_spec_is_in_the_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until somebody writes why not: here, of a field whose line in the table is taken out."""
    without = {name: why for name, why in SPEC_EXCLUDED.items() if name != "defrag.threshold"}
    monkeypatch.setattr(keys, "SPEC_EXCLUDED", without)

    found = findings(store, SPEC, ENTRIES, TARGET)

    assert names(found) == [{"spec.defrag.threshold"}] * len(ENTRIES)
    assert {change.old for finding in found for change in finding.changes} == {None}


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_every_key_of_a_models_config_is_a_named_miss_or_excluded(tmp_path: Path, file: str) -> None:
    config, wrong = config_of(file), []
    opened = Store.open(tmp_path / "store")
    built(opened, _with_config(config), ENTRIES[:1], LABELS, TARGET)
    for key, value in config.items():
        (found,) = findings(opened, _with_config({**config, key: _other_json(value)}), ENTRIES[:1], TARGET)
        named = [] if key in CONFIG_KEYS_EXCLUDED else [f"model.model.config.{key}"]
        if [change.name for change in found.changes] != named or (not named and found.state != "warm"):
            wrong.append(key)

    assert wrong == []


def _with_config(config: dict[str, Any]) -> BuildSpec:
    model = SPEC.model.model_copy(update={"config": config})
    return SPEC.model_copy(update={"model": model, "mhc": SPEC.mhc.model_copy(update={"rule": "one"})})


def _other_json(value: Any) -> Any:
    match value:
        case bool() | None:
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 if value else 1.0
        case str():
            return f"{value}x"
        case list():
            return [*value, 1]
        case dict():
            return {**value, "another": 1}
    raise AssertionError(value)


def test_excluded_keys_of_a_config_are_hits_and_say_why(store: Store) -> None:
    other = _with_config({**SPEC.model.config, **dict.fromkeys(CONFIG_KEYS_EXCLUDED, "anything else")})

    assert states(findings(store, other, ENTRIES, TARGET)) == {"warm"}
    assert all(CONFIG_KEYS_EXCLUDED.values())


def _target_mutations() -> Iterator[tuple[str, str, Target]]:
    yield "backend", "target.backend", TARGET.model_copy(update={"backend": "cuda"})
    yield "machine", "target.machine", TARGET.model_copy(update={"machine": "aarch64"})
    for feature in TARGET.isa:
        fewer = tuple(name for name in TARGET.isa if name != feature)
        yield f"without {feature}", "target.isa", TARGET.model_copy(update={"isa": fewer})
    yield "another feature", "target.isa", TARGET.model_copy(update={"isa": (*TARGET.isa, "zz")})
    for table in ("toolchain", "flags"):
        values = getattr(TARGET, table)
        for name in values:
            other = {**values, name: f"{values[name]}x"}
            yield f"{table} {name}", f"target.{table}.{name}", TARGET.model_copy(update={table: other})
            rest = {key: value for key, value in values.items() if key != name}
            yield f"no {name}", f"target.{table}.{name}", TARGET.model_copy(update={table: rest})
        yield (
            f"new in {table}",
            f"target.{table}.new",
            TARGET.model_copy(update={table: {**values, "new": ""}}),
        )


TARGETS = {label: (name, target) for label, name, target in _target_mutations()}


def test_every_version_flag_and_cpu_feature_is_a_named_miss(store: Store) -> None:
    wrong = []
    for label, (name, target) in TARGETS.items():
        found = findings(store, SPEC, ENTRIES, target)
        of_units = [row[0] for row in unit_key("g", TARGET).differences(unit_key("g", target))]
        if (states(found), names(found), of_units) != ({"changed"}, [{name}] * len(ENTRIES), [name]):
            wrong.append(label)

    assert wrong == []


def test_the_mutated_target_has_every_feature_of_the_highest_level() -> None:
    assert TARGET.isa == ISA_LEVELS["avx512+amx"].features
    assert len(TARGETS) > len(TARGET.isa) + len(TARGET.flags) + len(TARGET.toolchain)


@pytest.mark.parametrize("name", ["graphs", "transformers"])
def test_every_version_of_what_traces_is_a_named_miss(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    versions = keys.builder_versions()
    monkeypatch.setattr(keys, "builder_versions", lambda: {**versions, name: "another"})

    found = findings(store, SPEC, ENTRIES, TARGET)

    assert {finding.changes for finding in found} == {
        (Change(f"toolchain.{name}", versions[name], "another"),)
    }


def test_what_traces_is_our_graph_code_and_transformers_alone() -> None:
    installed = importlib.metadata.version("transformers")

    assert keys.builder_versions() == {"graphs": keys.graph_code_digest(), "transformers": installed}


PACKAGE = Path(aotgaudi.__file__).parent
CODE = sorted(
    str(path.relative_to(PACKAGE))
    for pattern in ("backends/inductor/*.py", "backends/fake.py", "graphs/*.py")
    for path in PACKAGE.glob(pattern)
)

OF_UNITS = (
    "canonical.py",
    "choose_entries.py",
    "export.py",
    "paged_decode.py",
    "quantization.py",
    "quantized_linear.py",
    "sample_tokens.py",
)
"""Files of `graphs` that say what a unit's text means, or that what compiles it calls."""


@pytest.mark.parametrize("file", CODE)
def test_an_edit_of_what_compiles_is_another_target_and_of_what_does_not_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """What a target has in its toolchain is a named miss: see above."""
    digests = {module: module.compile_code_digest.__wrapped__ for module in (inductor_probe, fake)}
    before = {module: digest() for module, digest in digests.items()}
    for folder in ("backends", "graphs"):
        shutil.copytree(PACKAGE / folder, tmp_path / folder)
    for module, name in ((inductor_probe, "inductor/probe.py"), (fake, "fake.py")):
        monkeypatch.setattr(module, "__file__", str(tmp_path / "backends" / name))
    assert {module: digest() for module, digest in digests.items()} == before

    (tmp_path / file).write_text("edited = 1\n", encoding="utf-8")

    folder, _, name = file.rpartition("/")
    compiles = {
        "backends/inductor": {inductor_probe} if name not in inductor_probe.NO_COMPILE_CODE else set(),
        "backends": {fake},
        "graphs": {inductor_probe} if name in OF_UNITS else set(),
    }
    assert {module for module, digest in digests.items() if digest() != before[module]} == compiles[folder]


def test_graph_code_that_the_compile_code_imports_is_in_its_digest() -> None:
    files = (PACKAGE / "backends" / "inductor").glob("*.py")
    texts = [path.read_text() for path in files if path.name not in inductor_probe.NO_COMPILE_CODE]
    imported = {name for text in texts for name in re.findall(r"^from aotgaudi\.graphs\.(\w+)", text, re.M)}

    assert {f"{name}.py" for name in imported} <= set(inductor_probe.COMPILED_GRAPH_CODE)


@pytest.mark.process
def test_the_code_that_compiles_is_in_the_toolchain_of_every_target() -> None:
    probed = (inductor_probe.probe("native"), fake.probe())

    assert [target.toolchain["compile_code"] for target in probed] == [
        inductor_probe.compile_code_digest(),
        fake.compile_code_digest(),
    ]
    assert all(
        (PACKAGE / "backends" / "inductor" / name).is_file() for name in inductor_probe.NO_COMPILE_CODE
    )


GRAPH = (
    '"aotgaudi.graph/2"',
    '["input","float32",[2,64],[64,1]]',
    '["input","float32",[64,64],[64,1]]',
    '["call","aten.t.default",[{"%":1}],{}]',
    '["call","aten.mm.default",[{"%":0},{"%":2}],{}]',
    '["call","aten.relu.default",[{"%":3}],{}]',
    '["output",[{"%":4}]]',
)


def text_of(lines: tuple[str, ...]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _graph_mutations() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """What is done to a graph, the lines, and the old line in which the difference begins."""
    for number, line in enumerate(GRAPH):
        before, after = GRAPH[:number], GRAPH[number + 1 :]
        yield f"edited {number}", (*before, f"{line[:-2]}~{line[-2:]}", *after), line
        yield f"dropped {number}", (*before, *after), line
        yield f"doubled {number}", (*before, line, line, *after), (*after, "")[0]
        if after:
            yield f"swapped {number}", (*before, after[0], line, *after[1:]), line


GRAPHS = {label: (lines, line) for label, lines, line in _graph_mutations()}


@pytest.mark.parametrize(("lines", "line"), GRAPHS.values(), ids=GRAPHS)
def test_every_line_of_a_graph_is_a_miss_that_shows_the_line(
    tmp_path: Path, lines: tuple[str, ...], line: str
) -> None:
    opened = Store.open(tmp_path / "store")
    compiled(opened, text_of(GRAPH), "layer x", TARGET)
    other_model = _with_config({**SPEC.model.config, "vocab_size": 7})
    _trace(opened, other_model, text_of(GRAPH))
    _trace(opened, SPEC, text_of(lines))

    program, unit = findings(opened, SPEC, ENTRIES[:1], TARGET)

    assert program.state == "warm"
    assert (unit.state, [change.name for change in unit.changes]) == ("changed", ["graph"])
    assert unit.lines is not None
    assert unit.lines[0] == line
    assert unit.lines[0] != unit.lines[1]


def _trace(store: Store, spec: BuildSpec, text: str) -> None:
    """Records that the first entry was traced, to a program of one unit."""
    digest = str(store.objects.put_bytes(text.encode()))
    key = keys.ProgramKeys(spec, TARGET).of(ENTRIES[0])
    row = ProgramRow(
        program=str(Digest.parse(digest)),
        units={unit_key(text, TARGET).hex: UnitSource(text=digest, label="layer x")},
        components=dict(key.components),
    )
    record(store, key.hex, row)


@pytest.mark.parametrize("cut", [(0, 1), (1, 0), (0, 0)])
def test_no_white_space_of_a_graph_is_left_out(cut: tuple[int, int]) -> None:
    text = text_of(GRAPH)
    other = " " * cut[0] + text + "\n" * cut[1]

    assert (unit_key(text, TARGET) == unit_key(other, TARGET)) == (cut == (0, 0))
