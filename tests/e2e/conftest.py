"""One model, one store, one bundle for all end-to-end tests of a run.

Building takes a minute or two. With ``AOTGAUDI_TEST_STORE`` set to a directory, what was compiled is kept
there from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.entries import DecodeEntry
from tests.e2e.harness import SPEC, Server, Workplace, make_model, own_object, store_without

HOLE = DecodeEntry(batch_size=1, query_len=1, num_blocks=2)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A spec, the model that it is for, and the bundle that the command line builds of it."""
    folder = tmp_path_factory.mktemp("e2e")
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    place = Workplace(
        folder=folder,
        spec=folder / "e2e-llama.toml",
        model=folder / "model",
        store=Path(kept).absolute() if kept else folder / "store",
        bundle=folder / "e2e-llama.bundle",
    )
    make_model(place.model)
    place.spec.write_text(SPEC, encoding="utf-8")
    done = place.run("build", place.spec, "-o", place.bundle, "--store", place.store)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="session")
def server(workplace: Workplace) -> Iterator[Server]:
    """A strict server that several tests share: each leaves it idle."""
    with workplace.serve("--store", workplace.folder / "no-such-store") as running:
        yield running


@pytest.fixture(scope="session")
def holed_store(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has everything but the artifact that `HOLE` needs. Not to be written to."""
    lost = own_object(workplace.bundle, HOLE)
    return store_without(workplace.store, lost, tmp_path_factory.mktemp("holed") / "store")


@pytest.fixture(scope="session")
def holed_bundle(workplace: Workplace, holed_store: Path) -> Path:
    """What that store gives with --allow-missing."""
    bundle = holed_store.parent / "holed.bundle"
    done = workplace.run(
        "build", "bundle", workplace.spec, "-o", bundle, "--allow-missing", "--store", holed_store
    )
    assert done.returncode == 0, done.stderr
    return bundle
