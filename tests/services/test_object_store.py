"""S3, as moto's server in this process speaks it, through fsspec and s3fs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.share.remote import Remote
from aotgaudi.store.store import Store
from tests.services.conftest import aotgaudi, files, run
from tests.unit.compile.test_read_through import built, unit_object
from tests.workload import key_of

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


def build(folder: Path, store: str, *arguments: object) -> str:
    return aotgaudi("build", "cache", folder / "tiny.toml", "--store", folder / store, *arguments).output


def test_a_store_is_shared_through_s3(built: Store, bucket: str, tmp_path: Path) -> None:
    assert "7 results uploaded" in build(tmp_path, "built", "--remote", bucket, "--push")
    assert ", 0 results uploaded" in build(tmp_path, "built", "--remote", bucket, "--push")
    taken = build(tmp_path, "new", "--remote", bucket)
    for name in ("built", "new"):
        spec, out = tmp_path / "tiny.toml", tmp_path / f"{name}.bundle"
        aotgaudi("build", "bundle", spec, "-o", out, "--store", tmp_path / name)

    assert "7 fetched" in taken
    assert "0 units compiled" in taken
    assert files(tmp_path / "built.bundle") == files(tmp_path / "new.bundle")


def test_a_large_object_comes_in_parts(bucket: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 80_000  # 20 MB: s3fs uploads and we download in parts.
    (tmp_path / "file").write_bytes(data)
    remote, digest = Remote(bucket), Digest.of(data)

    remote.put(digest, tmp_path / "file")

    assert remote.has(digest)
    assert b"".join(remote.chunks(digest)) == data


def test_layout_in_the_bucket(built: Store, bucket: str, tmp_path: Path) -> None:
    import boto3

    build(tmp_path, "built", "--remote", bucket, "--push")

    listed = {row["Key"] for row in boto3.client("s3").list_objects_v2(Bucket="cache")["Contents"]}
    key = key_of("head b")
    assert {f"team/{unit_object(built, 'head b')}", f"team/records/{key[:2]}/{key}.json"} <= listed


def test_rot_in_the_bucket_is_found_and_mended(built: Store, bucket: str, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3")
    build(tmp_path, "built", "--remote", bucket, "--push")
    name = f"team/{unit_object(built, 'head b')}"
    good = client.get_object(Bucket="cache", Key=name)["Body"].read()
    client.put_object(Bucket="cache", Key=name, Body=b"x" * len(good))

    mending = aotgaudi(
        "build", "cache", tmp_path / "tiny.toml", "--store", tmp_path / "new", "--remote", bucket, "--push"
    )

    assert "its bytes are not what its digest says" in mending.stderr
    assert "6 fetched" in mending.stdout
    assert "1 units compiled, 1 results uploaded" in mending.stdout
    assert "7 fetched" in build(tmp_path, "third", "--remote", bucket)


def test_a_bucket_that_is_not_there_is_one_warning(built: Store, bucket: str, tmp_path: Path) -> None:
    result = run(
        "build",
        "cache",
        tmp_path / "tiny.toml",
        "--store",
        built.root,
        "--remote",
        "s3://nothing/team",
        "--push",
    )

    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: s3://nothing/team: ")
    assert SECRET not in result.output
