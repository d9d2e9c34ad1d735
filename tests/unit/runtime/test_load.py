"""Weights: bindings, reading safetensors files, and tensors as units take them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from aotgaudi.backends.base import Target
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, SpecError, TargetError, UntrustedError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.runtime.load import bind_weights, load_weights
from aotgaudi.runtime.weights import ShardReader, WeightBinding, placed, weight_bindings
from tests.unit.runtime.test_executables import program

ONE, OTHER = "1" * 64, "2" * 64


def receipt(**layouts: Mapping[str, str]) -> Receipt:
    artifact = {"unit.so": Digest.of(b"x")}
    units = {
        key: SealedUnit(artifact=artifact, tolerance=0, layouts=layouts.get(name, {}))
        for key, name in ((ONE, "one"), (OTHER, "other"))
    }
    return Receipt(
        manifest_id="m", target=Target(backend="fake", machine="x"), programs={}, units=units, builder={}
    )


CALLS = [
    (ONE, ("step:x", "weight:q+k", "weight:norm"), ("0.0",)),
    (OTHER, ("tmp:0.0", "weight:embed", "weight:norm"), ("1.0",)),
    (ONE, ("tmp:1.0", "weight:q+k", "weight:embed"), ("2.0",)),
]


def test_layouts_go_with_the_unit_that_asks_for_them() -> None:
    bound = placed(program(CALLS, ("2.0",)), receipt(one={"1": "onednn"}))

    assert [call.inputs for call in bound.calls] == [
        ("step:x", "weight:q+k@onednn", "weight:norm"),
        ("tmp:0.0", "weight:embed", "weight:norm"),
        ("tmp:1.0", "weight:q+k@onednn", "weight:embed"),
    ]


def test_without_layouts_a_program_stays_as_it_is() -> None:
    assert placed(program(CALLS, ("2.0",)), receipt()) == program(CALLS, ("2.0",))


def test_a_unit_of_no_receipt_is_named() -> None:
    with pytest.raises(KeyError, match="3333"):
        placed(program([("3" * 64, ("step:x",), ("0.0",))], ("0.0",)), receipt())


@pytest.mark.parametrize(
    ("text", "names", "layout"),
    [
        ("weight:a.b", ("a.b",), None),
        ("weight:a+b", ("a", "b"), None),
        ("weight:a@onednn", ("a",), "onednn"),
        ("weight:a+b@onednn", ("a", "b"), "onednn"),
    ],
)
def test_bindings_are_read(text: str, names: tuple[str, ...], layout: str | None) -> None:
    binding = WeightBinding.parse(text)

    assert (binding.names, binding.layout) == (names, layout)


def test_bindings_of_placed_programs_are_listed_once() -> None:
    bound = placed(program(CALLS, ("2.0",)), receipt(one={"2": "onednn"}))

    assert [binding.text for binding in weight_bindings([bound, bound])] == [
        "weight:q+k",
        "weight:norm@onednn",
        "weight:embed",
        "weight:norm",
        "weight:embed@onednn",
    ]


A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4.0)
SPECS = (
    TensorSpec(name="a", shape=(2, 3), dtype="float32"),
    TensorSpec(name="b", shape=(4,), dtype="float32"),
)


def shards(folder: Path, weight_map: Mapping[str, object], **files: Mapping[str, torch.Tensor]) -> Path:
    """A model directory of several files with an index."""
    for name, tensors in files.items():
        save_file(dict(tensors), folder / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def test_an_index_leads_to_the_files_that_are_needed_and_no_other_is_opened(tmp_path: Path) -> None:
    names = {"a": "one.safetensors", "b": "two.safetensors", "other": "absent.safetensors"}
    shards(tmp_path, names, one={"a": A}, two={"b": B})

    weights = load_weights(ShardReader(ModelDirectory(tmp_path)), SPECS)

    assert torch.equal(weights["a"], A)
    assert torch.equal(weights["b"], B)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            {"a": A.T.contiguous(), "b": B},
            r"model\.safetensors: a has shape \[3, 2\], the bundle needs \[2, 3\]",
        ),
        ({"c": B}, r"holds no tensor 'a' \(2 missing in all\).*model import"),
        *(
            ({"a": A.to(dtype), "b": B}, rf"model\.safetensors: a has dtype {name}, the bundle needs float32")
            for dtype, name in ((torch.int32, "I32"), (torch.int8, "I8"), (torch.bool, "BOOL"))
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)

    with pytest.raises(SpecError, match=reason) as refusal:
        load_weights(ShardReader(ModelDirectory(tmp_path)), SPECS)

    assert refusal.value.where == str(path if "a" in tensors else tmp_path)


def test_integers_of_another_width_are_converted_if_they_fit(tmp_path: Path) -> None:
    """Such as the experts of each token in hash routing."""
    wide = torch.tensor([0, 5, -7, 2**31 - 1])
    spec = TensorSpec(name="a", shape=(4,), dtype="int64")
    save_file({"a": wide.to(torch.int32)}, tmp_path / "model.safetensors")

    assert torch.equal(load_weights(ShardReader(ModelDirectory(tmp_path)), [spec])["a"], wide)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([2**31]), "int32"),
        (torch.tensor([-1]), "uint8"),
        (torch.tensor([200], dtype=torch.uint8), "int8"),
    ],
)
def test_integers_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, stored: torch.Tensor, dtype: str
) -> None:
    save_file({"a": stored}, tmp_path / "model.safetensors")

    with pytest.raises(SpecError, match=rf"weights: a: has numbers of \w+ that {dtype} has not"):
        load_weights(ShardReader(ModelDirectory(tmp_path)), [TensorSpec(name="a", shape=(1,), dtype=dtype)])


NO_INDEX = r"index\.json: (is not a safetensors index|cannot be read as JSON|holds list)"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        *((text, NO_INDEX) for text in ("{", "[]", '{"weight_map": 5}', "{}")),
        *(
            (json.dumps({"weight_map": {"a": value, "b": value}}), r"index\.json: .*(no file name|outside)")
            for value in (5, None, ["one.safetensors"], {}, "one\0two")
        ),
        ('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}', "holds no tensor 'b'"),
        (
            '{"weight_map": {"a": "none.safetensors", "b": "none.safetensors"}}',
            r"none\.safetensors: cannot be read as safetensors: no such file",
        ),
    ],
)
def test_an_index_that_leads_to_no_weights_is_refused(tmp_path: Path, index: str, reason: str) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")

    with pytest.raises(SpecError, match=reason):
        load_weights(ShardReader(ModelDirectory(tmp_path)), SPECS)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    reader = ShardReader(ModelDirectory(tmp_path))
    with pytest.raises(
        SpecError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        load_weights(reader, SPECS)

    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(SpecError, match=r"model\.safetensors: cannot be read as safetensors"):
        load_weights(ShardReader(ModelDirectory(tmp_path)), SPECS)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors"])
def test_an_index_cannot_name_a_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": A, "b": B}, tmp_path / "outside.safetensors")
    shards(folder, {"a": name, "b": name})

    with pytest.raises(SpecError, match="names a file outside its directory"):
        load_weights(ShardReader(ModelDirectory(folder)), SPECS)


def reader(folder: Path, **bound: bytes) -> ShardReader:
    digests = {name.replace("__", "."): Digest.of(data) for name, data in bound.items()}
    return ShardReader(ModelDirectory(folder, digests or None))


@pytest.mark.parametrize("how", ["zeros", "truncated", "removed"])
def test_weights_that_were_read_stay_whatever_happens_to_the_file(tmp_path: Path, how: str) -> None:
    path = tmp_path / "model.safetensors"
    large = torch.arange(3.0 * (1 << 20)).reshape(3, -1)  # More than one piece.
    save_file({"a": large, "b": B}, path)
    wanted = (TensorSpec(name="a", shape=tuple(large.shape), dtype="float32"), SPECS[1])
    shards_reader = reader(tmp_path)
    shards_reader.prefetch(wanted)

    if how == "zeros":
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    elif how == "truncated":
        os.truncate(path, 0)
    else:
        path.unlink()

    weights = load_weights(shards_reader, wanted)
    assert torch.equal(weights["a"], large)
    assert torch.equal(weights["b"], B)


@pytest.mark.parametrize("unwanted", [{}, {"z": torch.ones(1 << 18)}])
def test_bound_weights_are_hashed_whole_as_they_are_read(
    tmp_path: Path, unwanted: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B, **unwanted}, path)
    data = path.read_bytes()
    assert torch.equal(load_weights(reader(tmp_path, model__safetensors=data), SPECS)["a"], A)

    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(CorruptError, match=r"model\.safetensors is not what the bundle binds"):
        load_weights(reader(tmp_path, model__safetensors=data), SPECS)


def test_an_index_that_is_not_bound_is_refused(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors.index.json").write_text("{}")

    with pytest.raises(UntrustedError, match=r"index\.json is not one of the files that the bundle binds"):
        load_weights(reader(tmp_path, model__safetensors=data), SPECS)


def tensor(begin: int, end: int, dtype: object = "F32", shape: object = (4,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"b": tensor(0, 16)}, 12),
        ({"b": tensor(0, 16)}, 20),
        ({"b": tensor(0, 16), "a": tensor(8, 24)}, 24),
        ({"b": tensor(4, 20)}, 20),
        ({"b": tensor(16, 0)}, 16),
        ({"b": tensor(0, 16, shape=(5,))}, 16),
        ({"b": tensor(0, 16, shape=(-4,))}, 16),
        ({"b": tensor(0, 16, shape=(True, 4))}, 16),
        ({"b": tensor(0, 16, shape="4")}, 16),
        ({"b": tensor(0, 16, dtype=5)}, 16),
        ({"b": tensor(0, 16, dtype="F99")}, 16),
        ({"b": 5}, 0),
        ({"b": {"dtype": "F32"}}, 0),
        ([], 0),
    ],
)
def test_a_header_that_does_not_describe_the_data_is_refused(
    tmp_path: Path, header: object, num_bytes: int
) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(num_bytes)
    (tmp_path / "model.safetensors").write_bytes(data)

    with pytest.raises(SpecError, match=r"model\.safetensors: ") as refusal:
        load_weights(reader(tmp_path), SPECS[1:])

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)

    with pytest.raises(SpecError, match=r"model\.safetensors: cannot be read as"):
        load_weights(reader(tmp_path), SPECS)


def test_a_sparse_file_of_a_terabyte_is_refused_at_once(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 1 << 40)

    with pytest.raises(SpecError, match=r"it has 1099511627776 bytes, its tensors need \d+"):
        load_weights(reader(tmp_path), SPECS)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)

    with pytest.raises(SpecError, match=rf"{name}: cannot be read: it is a (FIFO|directory|device)"):
        load_weights(reader(tmp_path), SPECS)


def test_what_was_stopped_ends(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    stopped = reader(tmp_path)
    stopped.stop()

    with pytest.raises(SpecError, match="stopped"):
        stopped.prefetch(SPECS)


@pytest.mark.parametrize("seed", range(10))
def test_any_mixture_of_sizes_dtypes_and_names_is_read_right(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    tensors = {
        f"{number:02}": torch.rand(random.choice((0, 1, 3, 16, 32, 64, 65))).to(
            random.choice([*dtypes.values()])
        )
        for number in range(30)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    specs = [
        TensorSpec(
            name=name, shape=tuple(value.shape), dtype=random.choice(("float32", "bfloat16", "bfloat16"))
        )
        for name, value in tensors.items()
        if random.random() < 0.7
    ]

    for bound in ({}, {"model__safetensors": data}):
        weights = load_weights(reader(tmp_path, **bound), specs)
        assert weights.keys() == {spec.name for spec in specs}
        for spec in specs:
            assert torch.equal(weights[spec.name], tensors[spec.name].to(dtypes[spec.dtype])), spec


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")

    stored = reader(tmp_path).take(SPECS)

    assert [bytes(tensor.data) for tensor in stored.values()] == [A.numpy().tobytes(), B.numpy().tobytes()]
    assert stored["a"].data.obj is not stored["b"].data.obj


def negated(layout: str, tensor: torch.Tensor) -> torch.Tensor:
    """A layout that is seen."""
    assert layout == "negated"
    return -tensor


def test_weights_are_bound_as_units_take_them_and_the_rest_is_let_go() -> None:
    stored = {"a": A, "b": A + 6, "c": B}
    texts = ("weight:a+b@negated", "weight:a", "weight:b+a", "weight:c@negated")

    bound = bind_weights([WeightBinding.parse(text) for text in texts], stored, negated)

    assert bound.keys() == set(texts)
    assert torch.equal(bound["weight:a+b@negated"], -torch.arange(12.0).reshape(4, 3))
    assert bound["weight:a"] is A
    assert torch.equal(bound["weight:b+a"], torch.cat([A + 6, A]))
    assert torch.equal(bound["weight:c@negated"], -B)
    assert not stored


@given(
    texts=st.sets(
        st.builds(
            lambda names, at: f"weight:{'+'.join(names)}{at}",
            st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4),
            st.sampled_from(["", "@negated"]),
        ),
        max_size=12,
    )
)
def test_any_bindings_are_what_each_alone_would_be(texts: set[str]) -> None:
    bindings = [WeightBinding.parse(text) for text in sorted(texts)]
    tensors = {name: torch.full((2, 3), float(ord(name))) for binding in bindings for name in binding.names}

    bound = bind_weights(bindings, dict(tensors), negated)

    for binding in bindings:
        whole = torch.cat([tensors[name] for name in binding.names])
        assert torch.equal(bound[binding.text], whole if binding.layout is None else -whole)


def test_a_layout_that_is_not_known_ends_the_load() -> None:
    def unknown(layout: str, tensor: torch.Tensor) -> torch.Tensor:
        raise TargetError(f"the layout {layout!r} is not known here")

    with pytest.raises(TargetError, match="'blocks' is not known"):
        bind_weights([WeightBinding.parse("weight:a@blocks")], {"a": A}, unknown)


def test_preparing_leaves_this_threads_own_number_of_threads_alone() -> None:
    before = torch.get_num_threads()

    bind_weights([WeightBinding.parse("weight:a@negated")], {"a": A}, negated)

    assert torch.get_num_threads() == before
