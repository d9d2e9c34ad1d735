"""A model directory: read with bounds, one line for whatever is wrong, and nobody else's to change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model_directory import (
    MAX_TEXT_BYTES,
    TEXTS,
    TOOL_USE_TEMPLATE,
    ModelDirectory,
    bind_model,
    check_model,
    model_spec,
    open_model,
)
from aotgaudi.bundle.signing import Signing, SigningKey, generate_key, load_signing_key
from aotgaudi.bundle.trust import OwnerRule, TrustPolicy
from aotgaudi.digest import Digest
from aotgaudi.errors import AotGaudiError, CorruptError, SpecError, UntrustedError
from aotgaudi.spec.build_spec import BuildSpec
from tests.specs import spec_of

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed

CONFIG = {"model_type": "llama", "hidden_size": 8}
DEEP = 200_000


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    folder = tmp_path / "parent" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ModelDirectory(folder)


def sparse(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 6 << 30)


BAD: dict[str, Callable[[Path], object]] = {
    "deep list": lambda path: path.write_bytes(b"[" * DEEP + b"]" * DEEP),
    "deep object": lambda path: path.write_bytes(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "NaN": lambda path: path.write_bytes(b'{"model_type": "llama", "a": NaN}'),
    "infinite": lambda path: path.write_bytes(b'{"model_type": "llama", "a": -Infinity}'),
    "6 GB": sparse,
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "latin": lambda path: path.write_bytes(b'{"a": "\xe9"}'),
    "list": lambda path: path.write_bytes(b"[]"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_used_is_one_line_and_soon(model: ModelDirectory, name: str, what: str) -> None:
    (model.path / name).unlink(missing_ok=True)
    BAD[what](model.path / name)
    started = time.process_time()

    with pytest.raises(SpecError) as refusal:
        _ = model_spec(model, "float32") if name == "config.json" else model.read_object(name)

    assert refusal.value.exit_code == 2
    assert str(refusal.value).startswith(f"{model.path / name}: ")
    assert "\n" not in str(refusal.value)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("value", ["1e999", "1" * 20, '{"b": 1e999}'])
def test_numbers_that_a_key_cannot_hold_are_refused_in_the_config(model: ModelDirectory, value: str) -> None:
    (model.path / "config.json").write_text(f'{{"model_type": "llama", "a": {value}}}')

    with pytest.raises(SpecError, match=r"config\.json: "):
        model_spec(model, "float32")


def test_the_config_and_what_is_absent(model: ModelDirectory) -> None:
    assert model_spec(model, "float32").config == CONFIG
    assert model_spec(model, "float32").name == "model"
    assert model.read("chat_template.jinja") is None
    assert model.read_object("tokenizer_config.json") == {}
    with pytest.raises(SpecError, match=r"has no config\.json"):
        model_spec(ModelDirectory(model.path / "none"), "float32")


def test_a_text_may_not_be_endless(model: ModelDirectory) -> None:
    (model.path / "config.json").write_bytes(b" " * (MAX_TEXT_BYTES + 1))

    with pytest.raises(SpecError, match=f"at most {MAX_TEXT_BYTES} are read"):
        model.read_object("config.json")


MINE = OwnerRule(os.geteuid(), trusts_group=True)


def refusal_of(model: ModelDirectory) -> str:
    owned = ModelDirectory(model.path, owners=MINE)
    with pytest.raises(UntrustedError) as caught:
        (owned.check_owners(), model_spec(owned, "float32"))
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_what_everybody_may_write_to_is_refused(model: ModelDirectory) -> None:
    ModelDirectory(model.path, owners=MINE).check_owners()
    model.path.chmod(0o775)
    (model.path / "config.json").chmod(0o664)
    ModelDirectory(model.path, owners=MINE).check_owners()
    assert model_spec(ModelDirectory(model.path, owners=MINE), "float32").config == CONFIG

    (model.path / "config.json").chmod(0o666)
    assert "config.json can be written to by everybody (mode 0666) (chmod -R go-w" in refusal_of(model)
    model.path.chmod(0o777)
    assert f"{model.path} can be written to by everybody (mode 0777)" in refusal_of(model)
    model.path.chmod(0o755)
    model.path.parent.chmod(0o777)
    assert refusal_of(model).startswith(f"everybody may replace {model.path}, for everybody may write to")
    model.path.parent.chmod(0o1777)
    (model.path / "config.json").chmod(0o644)
    ModelDirectory(model.path, owners=MINE).check_owners()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_refused(model: ModelDirectory) -> None:
    os.chown(model.path / "config.json", 12345, -1)
    assert "config.json belongs to uid 12345, who can change it" in refusal_of(model)


def bound(model: ModelDirectory) -> ModelDirectory:
    data = (model.path / "config.json").read_bytes()
    return ModelDirectory(model.path, {"config.json": Digest.of(data)})


def test_what_is_bound_is_read_and_nothing_else(model: ModelDirectory) -> None:
    binding = bound(model)
    (model.path / "README.md").write_text("never read")

    assert model_spec(binding, "float32").config == CONFIG
    assert binding.read("tokenizer.json") is None

    (model.path / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(
        UntrustedError, match=r"tokenizer\.json is not one of the files that the bundle binds"
    ):
        binding.read("tokenizer.json")


@pytest.mark.parametrize("change", ["edited", "longer", "removed"])
def test_a_bound_file_that_differs_is_refused_by_name(model: ModelDirectory, change: str) -> None:
    binding, path = bound(model), model.path / "config.json"
    if change == "removed":
        path.unlink()
    else:
        path.write_bytes(
            path.read_bytes().replace(b"8", b"9") if change == "edited" else path.read_bytes() + b" "
        )

    with pytest.raises(
        CorruptError, match=r"config\.json is (not what the bundle binds|missing, and)"
    ) as caught:
        model_spec(binding, "float32")

    assert isinstance(caught.value, AotGaudiError)
    assert caught.value.exit_code == 4


# Binding


@pytest.fixture
def spec() -> BuildSpec:
    return spec_of()


@pytest.fixture
def whole(tmp_path: Path, spec: BuildSpec) -> Path:
    """A model directory in which every file that a server may read is there."""
    folder = tmp_path / "whole"
    folder.mkdir()
    for name in TEXTS:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps(spec.model.config))
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    for name in ("1.safetensors", "2.safetensors", "model.safetensors", "README.md"):
        (folder / name).write_bytes(name.encode())
    return folder


def test_a_directory_fits_a_bundle_however_its_weights_are_packed(whole: Path) -> None:
    for quantization in (None, {"weights": "int8"}):
        check_model(spec_of(model={"quantization": quantization}), ModelDirectory(whole))


def test_what_a_server_reads_is_bound_and_nothing_else(whole: Path, spec: BuildSpec) -> None:
    bound = bind_model(whole, spec)

    assert bound.keys() == {*TEXTS, "1.safetensors", "2.safetensors"}
    assert bound["1.safetensors"] == Digest.of(b"1.safetensors")
    ModelDirectory(whole, bound).verify()
    assert ModelDirectory(whole, bound).describe() == "bound (9 files)"
    assert ModelDirectory(whole).describe() == "not bound"

    (whole / "README.md").write_text("changed")
    (whole / "model.safetensors").write_text("changed")
    ModelDirectory(whole, bound).verify()


def test_a_template_for_tools_is_bound_and_read_where_it_is_bound(whole: Path, spec: BuildSpec) -> None:
    without = bind_model(whole, spec)
    (whole / TOOL_USE_TEMPLATE).parent.mkdir()
    (whole / TOOL_USE_TEMPLATE).write_text("tools")
    bound = bind_model(whole, spec)

    assert bound.keys() - without.keys() == {TOOL_USE_TEMPLATE}
    ModelDirectory(whole, without).verify()  # A bundle from before it was read: it is still not read.
    assert [ModelDirectory(whole, each).may_read(TOOL_USE_TEMPLATE) for each in (None, bound, without)] == [
        True,
        True,
        False,
    ]
    (whole / TOOL_USE_TEMPLATE).parent.chmod(0o777)
    with pytest.raises(UntrustedError, match="additional_chat_templates can be written to by everybody"):
        ModelDirectory(whole, bound, MINE).check_owners()
    (whole / TOOL_USE_TEMPLATE).write_text("other")
    with pytest.raises(CorruptError, match="is not what the bundle binds"):
        ModelDirectory(whole, bound).verify()


@pytest.mark.parametrize("name", [*TEXTS, "1.safetensors", "2.safetensors"])
@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_bound_directory_is_verified_file_by_file(
    whole: Path, spec: BuildSpec, name: str, how: str
) -> None:
    model = ModelDirectory(whole, bind_model(whole, spec))
    _ = (whole / name).unlink() if how == "removed" else (whole / name).write_bytes(b"changed")

    with pytest.raises(CorruptError, match=rf"{name} is (not what the bundle binds|missing, and the bundle)"):
        model.verify()


@pytest.mark.parametrize("name", [*TEXTS, "1.safetensors", "2.safetensors"])
def test_a_file_of_terabytes_is_refused_before_it_is_hashed(whole: Path, spec: BuildSpec, name: str) -> None:
    model = ModelDirectory(whole, bind_model(whole, spec))
    os.truncate(whole / name, 4 << 40)  # An hour of hashing.

    with pytest.raises(CorruptError, match=rf"{name} is not what the bundle binds: it has {4 << 40} bytes"):
        model.verify()
    with pytest.raises(CorruptError, match=rf"{name} is not what the bundle binds: it has {4 << 40} bytes"):
        model.read(name)
    with pytest.raises(SpecError, match=rf"{name}: has {4 << 40} bytes, at most \d+ are read"):
        bind_model(whole, spec)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_file_that_would_be_read_and_is_not_bound_is_refused(
    whole: Path, spec: BuildSpec, name: str
) -> None:
    (whole / name).unlink()
    model = ModelDirectory(whole, bind_model(whole, spec))
    (whole / name).write_text("{}")

    with pytest.raises(UntrustedError, match=f"{name} is not one of the files that the bundle binds"):
        model.verify()
    with pytest.raises(UntrustedError, match=f"{name} is not one of the files"):
        model.read(name)


def test_another_model_is_not_bound(whole: Path, spec: BuildSpec) -> None:
    (whole / "config.json").write_text(json.dumps({**spec.model.config, "hidden_size": 8}))
    with pytest.raises(SpecError, match="is another model than the bundle was built for"):
        bind_model(whole, spec)


@pytest.mark.parametrize("shard", ["with space.safetensors", "absent.safetensors"])
def test_a_shard_that_cannot_be_bound_is_named(whole: Path, spec: BuildSpec, shard: str) -> None:
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))

    with pytest.raises(SpecError, match=shard):
        bind_model(whole, spec)


def test_a_signature_must_cover_the_model_unless_it_is_said_that_it_need_not(
    sealed: Sealed, tmp_path: Path
) -> None:
    key = load_signing_key_of(tmp_path)
    trust = TrustPolicy(keys=frozenset([key.public]))
    sealed.pack(signing=Signing((key,)))
    unbound = open_bundle(sealed.path, trust)

    with pytest.raises(
        UntrustedError, match=r"does not bind its model: .*--model DIR .*--allow-unbound-model"
    ):
        open_model(unbound, tmp_path)
    assert open_model(unbound, tmp_path, allow_unbound=True).bound is None
    assert open_model(sealed.open(), tmp_path).bound is None

    digests = {"config.json": Digest.of(b"{}")}
    sealed.pack(receipt=sealed.receipt.model_copy(update={"model": digests}), signing=Signing((key,)))
    assert open_model(open_bundle(sealed.path, trust), tmp_path).bound == digests


def load_signing_key_of(folder: Path) -> SigningKey:
    generate_key(folder / "key")
    return load_signing_key(folder / "key")
