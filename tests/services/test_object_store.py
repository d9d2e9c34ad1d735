"""S3, as moto's server in this process speaks it, through fsspec and s3fs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.share.file_remotes import ObjectStoreRemote
from tests.services.conftest import aotgaudi, files, run
from tests.unit.compile.test_share import built

__all__ = ["built"]

SECRET = "s3cret-key"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, which the environment says how to reach."""
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="cache")
    try:
        yield "s3://cache/team"
    finally:
        server.stop()


def test_a_store_is_shared_through_s3(built: object, bucket: str, tmp_path: Path) -> None:
    spec = tmp_path / "tiny.toml"
    aotgaudi("cache", "push", bucket, spec, "--store", tmp_path / "built")
    aotgaudi("cache", "pull", bucket, spec, "--store", tmp_path / "new")
    aotgaudi("build", "bundle", spec, "-o", tmp_path / "a", "--store", tmp_path / "built")
    aotgaudi("build", "bundle", spec, "-o", tmp_path / "b", "--store", tmp_path / "new")

    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_large_object_comes_in_parts_from_any_byte_on(bucket: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 80_000  # 20 MB: s3fs uploads and we download in parts.
    (tmp_path / "file").write_bytes(data)
    remote, digest = ObjectStoreRemote(bucket), Digest.of(data)

    remote.put(digest, tmp_path / "file")

    for offset in (0, 1, 9 << 20):
        with remote.read(digest, offset) as download:
            assert b"".join(download.chunks) == data[offset:]


def test_a_bucket_that_is_not_there_is_said_in_one_line(built: object, bucket: str, tmp_path: Path) -> None:
    url, spec = "s3://nothing/team", tmp_path / "tiny.toml"
    pushed = run("cache", "push", url, spec, "--store", tmp_path / "built")

    assert pushed.exit_code == 2
    assert pushed.stderr.startswith(f"error: {url}")
    assert len(pushed.stderr.splitlines()) == 1
    assert SECRET not in pushed.output
