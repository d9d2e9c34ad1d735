"""D-31: the backend ``hccl`` of torch.distributed, for a world of one.

There a sum is what was given, and nothing has to travel. More ranks are refused: collectives are not doubled.
Source: ``distributed/hccl/__init__.py`` of the bridge: it is registered with the extended API, for ``hpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork


def _create(options: Any, of_group: Any) -> FakeProcessGroup:
    del of_group
    if options.group_size != 1:
        raise NotImplementedError(f"the double has no collectives: hccl of {options.group_size} ranks")
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size)


torch.distributed.Backend.register_backend("hccl", _create, devices=["hpu"], extended_api=True)

_LIBRARY = torch.library.Library("c10d", "IMPL")


def _leaves(tensors: list[torch.Tensor], *_: Any) -> tuple[list[torch.Tensor], Any]:
    return tensors, FakeWork().boxed()


def _waits(*_: Any) -> Any:
    return FakeWork().boxed()


_OPERATORS: dict[str, Callable[..., Any]] = {"allreduce_": _leaves, "broadcast_": _leaves, "barrier": _waits}
for _name, _function in _OPERATORS.items():
    _LIBRARY.impl(_name, _function, "HPU")
