"""Weights by name: one file, several by an index, and directories that do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aotgaudi.errors import SpecError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.runtime.weights import load_weights

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


def test_one_file_gives_what_is_asked_for_and_no_more(tmp_path: Path) -> None:
    save_file({"a": A, "b": B, "other": B.clone()}, tmp_path / "model.safetensors")

    weights = load_weights(tmp_path, SPECS)

    assert weights.keys() == {"a", "b"}
    assert torch.equal(weights["a"], A)
    assert torch.equal(weights["b"], B)


def test_an_index_leads_to_the_files_that_are_needed_and_no_other_is_opened(tmp_path: Path) -> None:
    names = {"a": "one.safetensors", "b": "two.safetensors", "other": "absent.safetensors"}
    shards(tmp_path, names, one={"a": A}, two={"b": B})

    weights = load_weights(tmp_path, SPECS)

    assert torch.equal(weights["a"], A)
    assert torch.equal(weights["b"], B)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    save_file({"a": A.bfloat16(), "b": B}, tmp_path / "model.safetensors")

    assert load_weights(tmp_path, SPECS)["a"].dtype == torch.float32


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"a": A.T.contiguous(), "b": B}, tmp_path / "model.safetensors")

    with pytest.raises(SpecError, match=r"a has shape \[3, 2\], the bundle needs \[2, 3\]") as refusal:
        load_weights(tmp_path, SPECS)

    assert refusal.value.where == str(tmp_path / "model.safetensors")


def test_tensors_that_are_missing_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    save_file({"c": B}, tmp_path / "model.safetensors")

    with pytest.raises(SpecError, match=r"holds no tensor 'a' \(2 missing in all\).*model import"):
        load_weights(tmp_path, SPECS)


def test_a_tensor_that_its_shard_lacks_is_missing(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}, one={"a": A})

    with pytest.raises(SpecError, match="holds no tensor 'b'"):
        load_weights(tmp_path, SPECS)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors"])
def test_an_index_cannot_name_a_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": A, "b": B}, tmp_path / "outside.safetensors")
    shards(folder, {"a": name, "b": name})

    with pytest.raises(SpecError, match="names a file outside its directory"):
        load_weights(folder, SPECS)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 5}', "{}"])
def test_a_broken_index_is_refused_by_name(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")

    with pytest.raises(SpecError, match=r"model\.safetensors\.index\.json: is not a safetensors index"):
        load_weights(tmp_path, SPECS)


@pytest.mark.parametrize("name", ["one.safetensors", 5])
def test_a_shard_that_does_not_exist_is_named(tmp_path: Path, name: object) -> None:
    shards(tmp_path, {"a": name, "b": name})

    with pytest.raises(SpecError, match=rf"{name}: cannot be read as safetensors"):
        load_weights(tmp_path, SPECS)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)

    with pytest.raises(SpecError, match=r"model\.safetensors: cannot be read as safetensors"):
        load_weights(tmp_path, SPECS)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        load_weights(tmp_path, SPECS)
