"""What cannot be served is refused: soon, in words, with the command that mends it, and without listening."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.inductor.interface import arity_of
from aotgaudi.backends.inductor.native import load_unit
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.receipt import SealedUnit
from aotgaudi.bundle.signing import generate_key
from aotgaudi.entries import DecodeEntry
from aotgaudi.machine import group_folders
from aotgaudi.store.cas import object_path
from tests.e2e.harness import Refusal, Workplace, bind, copy_bundle, eventually, own_object, reseal
from tests.parallel import nightly

pytestmark = pytest.mark.slow

ENTRY = DecodeEntry(batch_size=1, query_len=1, num_blocks=2)
OTHER_ENTRY = DecodeEntry(batch_size=2, query_len=1, num_blocks=4)
LIMIT_SECONDS = 10.0
"""Of processor time, the preprocessor pool's included; a slow machine takes 5."""


def check(refusal: Refusal, exit_code: int, *words: str) -> None:
    """Asserts that a start was refused as it should be; `words` are in the message."""
    assert refusal.exit_code == exit_code, refusal.output
    assert "Traceback" not in refusal.output
    assert "error: " in refusal.output
    for word in words:
        assert word in refusal.output
    assert not refusal.has_listened
    assert refusal.cpu_seconds < LIMIT_SECONDS


def own(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Changes the artifact of a bundle that `ENTRY` needs and no other entry does."""
    return lambda bundle: change(own_object(bundle, ENTRY))


def edited(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda bundle: (bundle / name).write_bytes((bundle / name).read_bytes().replace(old, new))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def swap(bundle: Path) -> None:
    one, other = own_object(bundle, ENTRY), own_object(bundle, OTHER_ENTRY)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_symlink(path: Path) -> None:
    elsewhere = path.rename(path.with_name("elsewhere"))
    path.symlink_to(elsewhere)


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


truncate = own(lambda path: path.write_bytes(path.read_bytes()[:-1]))
CORRUPT = str(ENTRY), "corrupt"


@pytest.mark.parametrize(
    ("damage", "exit_code", "words"),
    [
        (own(Path.unlink), 3, (str(ENTRY), "missing")),
        (own(flip_a_bit), 4, CORRUPT),
        (swap, 4, (str(OTHER_ENTRY), *CORRUPT)),
        (own(lambda path: path.with_name("stray.so").write_bytes(b"\x7fELF")), 4, ("stray.so", "extra")),
        *(
            pytest.param(damage, 4, words, marks=pytest.mark.nightly)
            for damage, words in (
                (truncate, CORRUPT),
                (own(lambda path: path.write_bytes(path.read_bytes() + b"\0")), CORRUPT),
                (own(lambda path: path.write_bytes(b"")), (*CORRUPT, "has 0 bytes")),
                (own(to_directory), (*CORRUPT, "a directory")),
                (own(to_symlink), (*CORRUPT, "a symbolic link")),
                (own(to_fifo), (*CORRUPT, "a FIFO")),
                (edited("manifest.json", b"e2e-llama", b"e2e-lama"), ("manifest.json",)),
                (edited("receipt.json", b'"torch":"', b'"torch":"9'), ("receipt.json",)),
            )
        ),
    ],
)
def test_a_damaged_bundle_is_refused_with_the_entry_and_the_command_that_mends_it(
    workplace: Workplace,
    tmp_path: Path,
    damage: Callable[[Path], object],
    exit_code: int,
    words: tuple[str, ...],
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "damaged.bundle")
    damage(bundle)

    check(workplace.refusal(bundle=bundle), exit_code, "mend it with: aotgaudi build", *words)


def library_of(bundle: Path, unit: SealedUnit) -> Path:
    return object_path(bundle, unit.artifact["unit.so"])


def test_a_unit_says_the_same_before_and_after_it_is_loaded(workplace: Workplace) -> None:
    units = open_bundle(workplace.bundle).require_programs().units.values()
    paths = [library_of(workplace.bundle, unit) for unit in units]

    loaded = [load_unit(path) for path in paths]

    assert [arity_of(path.read_bytes()) for path in paths] == [
        unit and (unit.num_inputs, unit.num_outputs) for unit in loaded
    ]


def exchange_two_artifacts(bundle: Path, units: dict[str, SealedUnit]) -> None:
    one, *others = units
    arity = {key: arity_of(library_of(bundle, unit).read_bytes()) for key, unit in units.items()}
    other = next(key for key in others if arity[key] != arity[one])
    mine, theirs = units[one].artifact, units[other].artifact
    units[one] = units[one].model_copy(update={"artifact": theirs})
    units[other] = units[other].model_copy(update={"artifact": mine})


def rename_an_artifact(bundle: Path, units: dict[str, SealedUnit]) -> None:
    key, unit = next(iter(units.items()))
    units[key] = unit.model_copy(update={"artifact": {"other.so": unit.artifact["unit.so"]}})


def name_a_layout(bundle: Path, units: dict[str, SealedUnit]) -> None:
    for key, unit in units.items():
        units[key] = unit.model_copy(update={"layouts": {"0": "woven"}})


@pytest.mark.parametrize("change", [exchange_two_artifacts, rename_an_artifact, name_a_layout])
def test_verify_and_serve_refuse_the_same_receipts(
    workplace: Workplace, tmp_path: Path, change: Callable[[Path, dict[str, SealedUnit]], None]
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "resealed.bundle")
    units = dict(open_bundle(bundle).require_programs().units)
    change(bundle, units)
    reseal(bundle, lambda receipt: receipt.model_copy(update={"units": units}))

    check(workplace.refusal(bundle=bundle), 4, "corrupt", "cannot run: unit")
    assert workplace.run("verify", bundle).returncode == 4, "verify passes nothing that serve refuses"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two private keys; the public ones are beside them."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "strangers"):
        generate_key(folder / name)
    return folder / "ours", folder / "strangers"


def trusting(key: Path, *others: str) -> tuple[str, ...]:
    return ("--trusted-key", f"{key}.pub", *others)


def test_a_bundle_that_nobody_trusted_has_signed_is_refused(
    workplace: Workplace, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    ours, strangers = keys
    bundle = copy_bundle(workplace.bundle, tmp_path / "signed.bundle")

    check(workplace.refusal(*trusting(ours), bundle=bundle), 4, "is not signed", "aotgaudi sign")
    assert workplace.run("sign", bundle, "--sign-key", strangers).returncode == 0
    check(workplace.refusal(*trusting(ours), bundle=bundle), 4, "no trusted key has signed it")
    assert workplace.run("sign", bundle, "--sign-key", ours).returncode == 0
    reseal(bundle, lambda receipt: receipt.model_copy(update={"builder": {"graphs": "evil"}}))
    check(workplace.refusal(*trusting(ours), bundle=bundle), 4, "is not what was signed")


def test_a_signed_bundle_is_served_with_the_model_that_it_binds(
    workplace: Workplace, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "signed.bundle")
    bind(bundle, workplace.model)
    assert workplace.run("sign", bundle, "--sign-key", keys[0]).returncode == 0

    with workplace.serve(*trusting(keys[0]), bundle=bundle) as server:
        maps = Path(f"/proc/{server.engine.pid}/maps").read_text(encoding="utf-8")
        assert f"/memfd:{own_object(bundle, ENTRY).name}" in maps
        assert str(bundle) not in maps
        assert str(workplace.model) not in maps
        for path in (path for path in bundle.rglob("*") if path.is_file()):
            path.chmod(0o644)
            path.write_bytes(b"\xcc" * path.stat().st_size)
        assert server.complete("the quick", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.client.get("/ready").json()["model"].startswith("bound (")


def test_a_signature_that_covers_no_model_is_refused_unless_that_is_allowed(
    workplace: Workplace, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "signed.bundle")
    assert workplace.run("sign", bundle, "--sign-key", keys[0]).returncode == 0

    refusal = workplace.refusal(*trusting(keys[0]), bundle=bundle)

    check(refusal, 4, "does not bind its model", "--model DIR", "--allow-unbound-model")
    with workplace.serve(*trusting(keys[0], "--allow-unbound-model"), bundle=bundle) as server:
        assert server.client.get("/ready").json()["model"] == "not bound"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "chat_template.jinja", *nightly("tokenizer.json", "config.json")]
)
def test_a_model_that_is_not_the_one_that_was_bound_is_refused_by_file(
    workplace: Workplace, tmp_path: Path, name: str
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "bound.bundle")
    bind(bundle, workplace.model)
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    with (model / name).open("ab") as file:
        file.write(b" ")

    check(workplace.refusal(model=model, bundle=bundle), 4, str(model / name), "binds")
    verified = workplace.run("verify", bundle, "--model", model)
    assert verified.returncode == 4
    assert str(model / name) in verified.stderr


def test_a_model_directory_that_everybody_may_write_to_is_refused(
    workplace: Workplace, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    model.chmod(0o777)

    check(workplace.refusal(model=model), 4, str(model), "everybody", "--allow-unsafe-permissions")


@pytest.mark.parametrize(("path", "mode"), [("", 0o777), ("manifest.json", 0o664), ("objects", 0o1777)])
def test_a_bundle_that_others_may_change_is_refused(
    workplace: Workplace, tmp_path: Path, path: str, mode: int
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "shared.bundle")
    (bundle / path).chmod(mode)

    check(
        workplace.refusal(bundle=bundle),
        4,
        "can be written to by",
        "chmod -R go-w",
        "--allow-unsafe-permissions",
    )


def test_a_truncated_object_is_refused_without_require_warm_too(workplace: Workplace, tmp_path: Path) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "damaged.bundle")
    truncate(bundle)

    check(workplace.refusal(bundle=bundle, strict=False), 4, "mend it with: aotgaudi build", str(ENTRY))


@pytest.mark.parametrize("strict", [True, False])
def test_a_bundle_with_holes_is_refused(workplace: Workplace, holed_bundle: Path, strict: bool) -> None:
    check(
        workplace.refusal(bundle=holed_bundle, strict=strict),
        3,
        str(ENTRY),
        "missing",
        f"aotgaudi build SPEC -o {holed_bundle}",
    )


def test_a_bundle_with_holes_is_not_sealed(workplace: Workplace, holed_store: Path, tmp_path: Path) -> None:
    done = workplace.run("build", "bundle", workplace.spec, "-o", tmp_path / "b", "--store", holed_store)

    assert done.returncode == 3
    assert str(ENTRY) in done.stderr
    assert "aotgaudi build cache" in done.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"toolchain": {"torch": "1.2.3", "compiler": "g++ 14.2.0"}}, ("torch 1.2.3",)),
        ({"isa": ("avx2", "avx9000")}, ("avx9000",)),
        pytest.param({"machine": "vax"}, ("machine vax",), marks=pytest.mark.nightly),
        ({"backend": "hpu"}, ("'hpu'",)),
    ],
    ids=["another torch", "a CPU feature that this machine lacks", "another machine", "another device"],
)
def test_a_bundle_for_another_target_is_refused_with_the_factor(
    workplace: Workplace, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "foreign.bundle")
    reseal(
        bundle,
        lambda receipt: receipt.model_copy(update={"target": receipt.target.model_copy(update=change)}),
    )

    refusal = workplace.refusal(bundle=bundle)

    check(refusal, 5, "target: compiled for", *words)
    assert workplace.run("verify", bundle).returncode == 5, "verify passes nothing that serve refuses"
    assert "rebuild" in refusal.output or "backend" in refusal.output


def configured(**changes: object) -> Callable[[Path], None]:
    """Changes a model's config."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def with_a_page_for(name: str) -> Callable[[Path], object]:
    """What a proxy answers lies where a file of the model should."""
    return lambda model: (model / name).write_bytes(b"<html>404</html>")


FOR_ANOTHER = "build a bundle for this model"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (configured(hidden_size=128), ("model.config.hidden_size", FOR_ANOTHER)),
        pytest.param(
            configured(rms_norm_eps=1e-3),
            ("model.config.rms_norm_eps", FOR_ANOTHER),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            configured(num_hidden_layers=3),
            ("model.config.num_hidden_layers", FOR_ANOTHER),
            marks=pytest.mark.nightly,
        ),
        (without("config.json"), ("config.json", "a Hugging Face model directory")),
        (without("model.safetensors"), ("model.safetensors", "aotgaudi model import")),
        (without("tokenizer.json"), ("tokenizer.json", "save_pretrained")),
        (with_a_page_for("config.json"), ("model/config.json",)),
        (with_a_page_for("model.safetensors"), ("model/model.safetensors",)),
        (with_a_page_for("tokenizer.json"), ("model/tokenizer.json",)),
    ],
)
def test_a_model_directory_of_another_model_or_with_a_file_that_is_gone_or_no_such_file_is_refused(
    workplace: Workplace, tmp_path: Path, change: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    change(model)

    check(workplace.refusal(model=model), 2, *words)


def test_a_model_directory_that_is_not_there_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    check(workplace.refusal(model=tmp_path / "none"), 2, str(tmp_path / "none"), "config.json")


def test_a_bundle_that_is_not_there_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    check(workplace.refusal(bundle=tmp_path / "none"), 2, str(tmp_path / "none"), "aotgaudi build")


def test_a_port_in_use_is_refused(workplace: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        check(workplace.refusal(port=port), 2, f"127.0.0.1:{port}", "--port")


def built_with(workplace: Workplace, bundle: Path, num_blocks: str) -> Path:
    """A bundle of the same entries, or nearly; `num_blocks` is the line in the spec."""
    spec = workplace.spec.with_name(f"{bundle.stem}.toml")
    text = workplace.spec.read_text(encoding="utf-8")
    spec.write_text(text.replace("num_blocks = 6", num_blocks), encoding="utf-8")
    built = workplace.run("build", spec, "-o", bundle, "--store", workplace.store)
    assert built.returncode == 0, built.stderr
    return bundle


def test_a_kv_cache_that_this_machine_cannot_hold_is_refused_before_anything_is_allocated(
    workplace: Workplace, tmp_path: Path
) -> None:
    bundle = built_with(workplace, tmp_path / "huge.bundle", "num_blocks = 2_000_000_000")

    words = ("2,000,000,000 KV blocks 14.90 TiB", "are free", "limits.num_blocks may be", "--kv-cache-memory")
    check(workplace.refusal(bundle=bundle), 5, *words)
    verified = workplace.run("verify", bundle)
    assert verified.returncode == 5
    assert all(word in verified.stderr for word in words)


@pytest.fixture
def small_group() -> Iterator[tuple[str, ...]]:
    """The words that run a command in a control group of 1 GiB of memory."""
    own, is_unified = next(group_folders("memory"))
    group = own / f"aotgaudi-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit = group / ("memory.max" if is_unified else "memory.limit_in_bytes")
        limit.write_text(str(1 << 30), encoding="ascii")
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        if subprocess.run(["sh", "-c", enter, group, "true"], capture_output=True, check=False).returncode:
            pytest.skip("the control group cannot be entered")
        yield "sh", "-c", enter, str(group)
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text(encoding="ascii"))
        group.rmdir()


def test_in_a_small_control_group_the_kv_cache_that_a_refusal_names_is_served(
    workplace: Workplace, tmp_path: Path, small_group: tuple[str, ...]
) -> None:
    bundle = built_with(workplace, tmp_path / "left-out.bundle", "")  # Two sequences of four blocks.

    refusal = workplace.refusal("--kv-cache-memory", "2GiB", bundle=bundle, prefix=small_group)

    check(
        refusal,
        5,
        "262,143 KV blocks 2.00 GiB",
        "of 1.00 GiB are free",
        "error: target: this machine has too little",
    )
    num_blocks, size = re.findall(r"may be ([\d,]+) at most, or --kv-cache-memory (\w+)", refusal.output)[0]
    with workplace.serve("--kv-cache-memory", size, bundle=bundle, prefix=small_group) as server:
        assert f"{num_blocks} blocks of 16 tokens" in server.log
        assert server.complete("the quick", max_tokens=8)["usage"]["completion_tokens"] == 8
    with workplace.serve(bundle=bundle, prefix=small_group) as server:
        assert " 8 blocks of 16 tokens" in server.log


def test_a_kv_cache_for_less_than_a_sequence_is_refused_and_one_for_a_sequence_is_served(
    workplace: Workplace,
) -> None:
    refusal = workplace.refusal("--kv-cache-memory", "39KiB")

    check(refusal, 2, "holds 3 KV blocks", "max_model_len 64 needs 4 (at least 40KiB)")
    with workplace.serve("--kv-cache-memory", "40KiB") as server:
        assert " 4 blocks of 16 tokens" in server.log
        assert server.complete("the quick", max_tokens=40)["usage"]["completion_tokens"] == 40
