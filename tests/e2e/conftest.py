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
from tests.e2e.harness import SPEC, Server, Workplace, copy_bundle, make_model, own_object, store_without
from tests.parallel import once, run_folder

HOLE = DecodeEntry(batch_size=1, query_len=1, num_blocks=2)
"""The smallest of `HOLES`: what a decode over two blocks takes."""
HOLES = (HOLE, DecodeEntry(1, 1, 4), *(DecodeEntry(2, 1, num_blocks) for num_blocks in (2, 4, 6, 8)))
"""All that cover a decode over two blocks: where one of them is warm, no other is ever missing."""


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A spec, the model that it is for, and the bundle that the command line builds of it."""
    folder = run_folder(tmp_path_factory) / "e2e"
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    place = Workplace(
        folder=folder,
        spec=folder / "e2e-llama.toml",
        model=folder / "model",
        store=Path(kept).absolute() if kept else folder / "store",
        bundle=folder / "e2e-llama.bundle",
    )
    once(tmp_path_factory, "workplace", lambda: furnish(place))
    return place


def furnish(place: Workplace) -> None:
    """Makes all that a workplace names."""
    place.folder.mkdir()
    make_model(place.model)
    place.spec.write_text(SPEC, encoding="utf-8")
    done = place.run("build", place.spec, "-o", place.bundle, "--store", place.store)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def server(workplace: Workplace) -> Iterator[Server]:
    """A strict server that several tests share: each leaves it idle."""
    with workplace.serve() as running:
        yield running


@pytest.fixture(scope="session")
def holed_store(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has everything but the artifacts that `HOLES` need. Not to be written to."""
    store = run_folder(tmp_path_factory) / "holed-store"
    lost = [own_object(workplace.bundle, hole) for hole in HOLES]
    once(tmp_path_factory, store.name, lambda: store_without(workplace.store, lost, store))
    return store


@pytest.fixture(scope="session")
def holed_bundle(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that has lost the artifacts that `HOLES` need."""
    bundle = run_folder(tmp_path_factory) / "holed.bundle"

    def copy() -> None:
        copy_bundle(workplace.bundle, bundle)
        for lost in [own_object(bundle, hole) for hole in HOLES]:
            lost.unlink()

    once(tmp_path_factory, bundle.name, copy)
    return bundle
