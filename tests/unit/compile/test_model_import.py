from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from aotgaudi.compile import model_import
from aotgaudi.compile.model_import import import_model
from aotgaudi.errors import SpecError, StoreError
from aotgaudi.share.hub import is_hub_id
from tests.command import Command
from tests.e2e.harness import make_model

NOBODY = 65534


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it, with sampling defaults of its own."""
    folder = tmp_path_factory.mktemp("source") / "model"
    make_model(folder)
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 1]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody can look into; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def run(*arguments: object) -> Result:
    return Command("model")("import", *arguments)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Runs what is inside as a user who owns nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_has_the_mode_that_the_umask_gives(
    source: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        import_model(str(source), tmp_path / "out", "float32")
    finally:
        os.umask(before)

    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes.keys() >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(modes.values()) == {oct(mode)}


def test_the_sampling_defaults_come_along(source: Path, tmp_path: Path) -> None:
    import_model(str(source), tmp_path / "out", "float32")

    defaults = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (defaults["temperature"], defaults["top_p"], defaults["eos_token_id"]) == (0.6, 0.9, [0, 1])


def test_a_directory_with_files_is_overwritten_by_force_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_text("another checkpoint's")
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "notes.txt").write_text("mine")

    refused = run(source, out, "--dtype", "float32")
    before = sorted(path.name for path in out.iterdir())
    forced = run(source, out, "--dtype", "float32", "--force")

    assert refused.exit_code == 2
    assert (
        refused.stderr == f"error: {out}: is a directory with files in it (another directory, or --force)\n"
    )
    assert before == ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"]
    assert forced.exit_code == 0
    weights = sorted(path.name for path in out.glob("*.safetensors*"))
    assert weights == ["model.safetensors"]
    assert (out / "notes.txt").read_text() == "mine"


def test_what_was_written_as_json(source: Path, tmp_path: Path) -> None:
    document = json.loads(run(source, tmp_path / "out", "--dtype", "float32", "--json").stdout)

    assert document["model"] == str(tmp_path / "out")
    assert set(document["files"]) == {path.name for path in (tmp_path / "out").iterdir()}


def test_two_imports_never_mix_their_files_in_one_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = model_import._load, tmp_path / "out"

    def load(*arguments: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(SpecError, match="another import writes to it now"):
            import_model(str(source), out, "float32")
        return real(*arguments)

    monkeypatch.setattr(model_import, "_load", load)
    import_model(str(source), out, "float32")

    assert (out / "config.json").exists()


def test_an_import_that_ended_while_another_fetched_its_source_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = model_import._locate, tmp_path / "out"

    def locate(name: str) -> Any:
        monkeypatch.undo()
        import_model(str(source), out, "float32")
        return real(name)

    monkeypatch.setattr(model_import, "_locate", locate)
    with pytest.raises(SpecError, match="is a directory with files in it"):
        import_model(str(source), out, "bfloat16")

    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_source_is_never_overwritten_by_itself(source: Path) -> None:
    with pytest.raises(SpecError, match="is the source itself"):
        import_model(str(source), source, "float32", overwrite=True)
    assert (source / "model.safetensors").is_file()


def test_a_directory_that_cannot_be_written_is_told_before_anything_is_loaded(public: Path) -> None:
    (public / "source").mkdir()
    (public / "source" / "config.json").write_text("{}")
    (public / "closed").mkdir(mode=0o555)

    for out in (public / "closed", public / "closed" / "out"):
        with as_nobody(), pytest.raises(StoreError, match=r"cannot write .*: Permission denied"):
            import_model(str(public / "source"), out, "float32")


def test_a_source_that_cannot_be_read_says_so(public: Path) -> None:
    (public / "source").mkdir()
    (public / "source" / "config.json").touch(mode=0)

    with as_nobody(), pytest.raises(SpecError, match=r"config\.json: cannot be read: Permission denied"):
        import_model(str(public / "source"), public / "out", "float32")


@pytest.mark.parametrize(
    "source", ["./model", "/no/such/model", "a/b/c", "model", "~/model", "a.gguf", "a/b.gguf"]
)
def test_a_mistyped_path_is_a_missing_file_at_once(tmp_path: Path, source: str) -> None:
    started = time.monotonic()
    result = run(source, tmp_path / "out")

    assert result.exit_code == 2
    assert result.stderr == f"error: {source}: there is no such file or directory (or a hub id, ORG/NAME)\n"
    assert time.monotonic() - started < 3


@pytest.mark.process
@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_is_out_of_reach_is_asked_once(tmp_path: Path, offline: bool) -> None:
    """Nobody listens at the endpoint; the cache is empty."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": str(int(offline)),
    }
    arguments = [sys.executable, "-m", "aotgaudi", "model", "import", "org/name", str(tmp_path / "out")]

    started = time.monotonic()
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("error: org/name cannot be had from the hub: ")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 20


def test_ids_of_the_hub_are_told_from_paths() -> None:
    ids = ["meta-llama/Llama-3.1-8B", "a/b", "Qwen/Qwen3_MoE"]
    paths = ["a", "a/", "/a", "./a", "~/a", "a/b/c", "a b/c", "../a", "-a/b", "a/b\n", ""]

    assert [text for text in ids + paths if is_hub_id(text)] == ids


MAGIC = b"GGUF"
VERSION = (3).to_bytes(4, "little")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC,
        MAGIC + VERSION,
        MAGIC + VERSION + bytes(8),
        MAGIC + VERSION + (1).to_bytes(8, "little") + bytes(8),
        MAGIC + VERSION + (1 << 60).to_bytes(8, "little") * 2,
        MAGIC + VERSION + bytes(8) + (1).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little") + b"x",
        MAGIC
        + VERSION
        + bytes(8)
        + (1).to_bytes(8, "little")
        + (1).to_bytes(8, "little")
        + b"k"
        + b"\xff" * 4,
        b"GGUX" + VERSION + bytes(16),
    ],
)
def test_a_malformed_gguf_is_told_in_one_line(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(data)

    result = run(path, tmp_path / "out")

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: cannot be loaded: ")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_safetensors_are_told_in_one_line(source: Path, tmp_path: Path, keep: int) -> None:
    cut = Path(shutil.copytree(source, tmp_path / "cut"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])

    result = run(cut, tmp_path / "out")

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {cut}: cannot be loaded: ")
    assert len(result.stderr.strip().splitlines()) == 1
