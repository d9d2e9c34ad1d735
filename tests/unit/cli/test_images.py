"""``aotgaudi build image``, ``push`` and ``pull``: what they print, and what misuse gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.errors import RemoteError
from aotgaudi.share.oci import Layout, parse_layout
from tests.command import Command
from tests.unit.bundle.conftest import Sealed, sealed
from tests.unit.share.archives import files

run = Command()

__all__ = ["sealed"]


class Registry:
    """Copies images as skopeo does, from and to folders in place of registries, and notes the options."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.options: list[dict[str, Any]] = []

    def copy(self, source: str, destination: str, **options: Any) -> str:
        self.options.append(options)
        here, there = self._path(source), self._path(destination)
        if not here.exists():
            raise RemoteError("skopeo: manifest unknown")
        shutil.copytree(here, there, dirs_exist_ok=True)
        return Layout(here).index().manifests[0].digest

    def _path(self, name: str) -> Path:
        if not name.startswith("docker://"):
            return parse_layout(name).root
        return self._root / name.removeprefix("docker://").replace("/", "_")


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.chdir(tmp_path)
    registry = Registry(tmp_path / "registry")
    for module in ("cli.images", "share.image"):
        monkeypatch.setattr(f"aotgaudi.{module}.copy_image", registry.copy)
    return registry


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_an_image_is_written_and_described(sealed: Sealed) -> None:
    result = done("build", "image", "bundle", "-o", "image", "--tag", "v1")

    manifest = json.loads(Path("image/index.json").read_bytes())["manifests"][0]["digest"]
    assert result.stdout.startswith(f"image: image:v1 {manifest} (layer of ")
    assert result.stdout.endswith("bundle at /opt/aotgaudi/bundle)\n")


def test_an_image_is_described_as_json_and_is_always_the_same(sealed: Sealed) -> None:
    documents = [
        json.loads(done("build", "image", "bundle", "-o", name, "--compression", "gzip", "--json").stdout)
        for name in ("a", "b")
    ]

    assert {document.pop("layout") for document in documents} == {"a", "b"}
    assert documents[0] == documents[1]
    assert documents[0]["tag"] == "latest"
    assert set(documents[0]) == {"tag", "manifest", "layer", "layer_bytes", "diff_id", "path"}


def test_a_bundle_goes_to_a_registry_and_comes_back(sealed: Sealed, registry: Registry) -> None:
    image = json.loads(done("build", "image", "bundle", "-o", "image", "--json").stdout)
    by_path = done("push", "bundle", "docker://a.b:5000/team/model:v1", "--insecure")
    by_layout = done("push", "oci:image:latest", "docker://a.b:5000/team/model:v2")
    at_once = done("build", "image", "bundle", "-o", "image", "--push", "docker://a.b:5000/team/model:v3")
    kept = done("push", "bundle", "oci:kept:v4")

    assert [options["is_insecure"] for options in registry.options] == [True, False, False, False]
    line = f"pushed: a.b:5000/team/model@{image['manifest']}\n"
    assert by_path.stdout == by_layout.stdout == line
    assert at_once.stdout.endswith(line)
    assert kept.stdout == f"pushed: oci:kept:v4 {image['manifest']}\n"
    for name in (
        "docker://a.b:5000/team/model:v1",
        "docker://a.b:5000/team/model:v3",
        "oci:image",
        "oci:kept",
    ):
        pulled = done("pull", name, "-o", "out")
        assert pulled.stdout == "pulled: out (5 objects, 835 bytes, all verified)\n"
        assert files(Path("out")) == files(sealed.path)
        shutil.rmtree("out")


def test_json_of_a_pull_says_what_came(sealed: Sealed) -> None:
    done("push", "bundle", "docker://a/b:v1")

    assert json.loads(done("pull", "docker://a/b:v1", "-o", "out", "--json").stdout) == {
        "bundle": "out",
        "manifest_id": sealed.manifest_id,
        "num_objects": 5,
        "size_bytes": sealed.open().index.counts.object_bytes,
    }


def test_a_base_comes_from_a_registry_or_a_layout(sealed: Sealed, registry: Registry) -> None:
    done("push", "bundle", "docker://a/server:v1")
    done("build", "image", "bundle", "-o", "layout")

    for base in ("docker://a/server:v1", "layout", "oci:layout:latest"):
        result = run("build", "image", "bundle", "-o", "image", "--base", base)
        assert result.exit_code == 2
        assert "the base image holds a bundle already" in result.stderr
    assert registry.options[1:] == [{"is_insecure": False, "architecture": "amd64"}]


def test_an_unsigned_bundle_is_refused_in_one_line_and_leaves_nothing(sealed: Sealed) -> None:
    done("push", "bundle", "docker://a/b:v1")
    done("key", "generate", "key")

    result = run("pull", "docker://a/b:v1", "-o", "out", "--trusted-key", "key.pub")
    assert result.exit_code == 4
    assert len(result.stderr.splitlines()) == 1
    assert "is not signed" in result.stderr
    assert not Path("out").exists()

    done("sign", "bundle", "--sign-key", "key")
    done("push", "bundle", "docker://a/b:v1")
    done("pull", "docker://a/b:v1", "-o", "out", "--trusted-key", "key.pub")
    assert open_bundle(Path("out")).index == sealed.open().index


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "image", "nothing", "-o", "i"], "no bundle at nothing"),
        (["build", "image", "bundle", "-o", "bundle"], "neither empty nor an image layout"),
        (["build", "image", "bundle", "-o", "i", "--tag", "a b"], "tag 'a b': is none"),
        (["build", "image", "bundle", "-o", "i", "--base", "nothing"], "nothing is no OCI image layout"),
        (["build", "image", "bundle", "-o", "i", "--base", "docker://a/b"], "skopeo: manifest unknown"),
        (["build", "image", "bundle", "-o", "i", "--compression", "xz"], "'xz' is not one of"),
        (["build", "image", "bundle"], "Missing option '-o'"),
        (["push", "nothing", "docker://a/b"], "no bundle at nothing"),
        (["push", "oci:nothing", "docker://a/b"], "skopeo: manifest unknown"),
        (["pull", "docker://a/b", "-o", "out"], "skopeo: manifest unknown"),
        (["pull", "oci:nothing", "-o", "out"], "nothing is no OCI image layout"),
        (["pull", "oci:nothing", "-o", "store"], "neither a bundle nor empty"),
        (["pull", "docker://a/b"], "Missing option '-o'"),
    ],
)
def test_misuse_is_said_in_one_line(sealed: Sealed, arguments: list[str], words: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not Path("out").exists()


@pytest.mark.process
def test_help_imports_no_compressor() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from aotgaudi.cli.main import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('requests', 'fsspec', 'zstandard', 'torch', 'rich') if m in sys.modules])"
    )
    for command in (["pull"], ["push"], ["build", "image"], ["build"]):
        output = subprocess.run(
            [sys.executable, "-c", code, *command, "--help"], check=True, capture_output=True, text=True
        ).stdout
        assert output.splitlines()[-1] == "[]"
