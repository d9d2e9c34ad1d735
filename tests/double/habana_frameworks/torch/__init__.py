"""The bridge: importing it makes ``hpu`` a device of torch."""

from __future__ import annotations

import atexit
import importlib.metadata
from pathlib import Path

import torch

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.journal import note
from habana_frameworks.bridge.profile import IS_FORK
from habana_frameworks.torch.utils.internal import is_lazy

_HERE = Path(__file__).parent


def _check_version() -> None:
    """D-02: torch must be the release that the bridge was built for, and, in the lazy mode, Intel's fork.

    Source: ``torch/__init__.py:33-50`` of the bridge.
    """
    required = (_HERE / "required_version.txt").read_text(encoding="ascii").strip()
    found = importlib.metadata.version("torch")
    assert found.split(".")[:2] == required.split(".")[:2], f"torch {found} is not {required}"
    if is_lazy():
        assert IS_FORK, "the lazy mode needs Intel's build of torch"


_check_version()
torch.ops.load_library(str(_HERE / "lib" / "libhabana_pytorch2_plugin.so"))
flags.tell_device()

atexit.register(lambda: [note(asked=name) for name in torch.ops.hpu_double.asked()])

import habana_frameworks.torch.distributed.hccl  # noqa: E402
import habana_frameworks.torch.hpex.kernels  # noqa: E402
import habana_frameworks.torch.hpex.normalization  # noqa: E402
from habana_frameworks.torch import hpu  # noqa: E402

torch._register_device_module("hpu", hpu)

from habana_frameworks.torch import core  # noqa: E402

core._begin()
