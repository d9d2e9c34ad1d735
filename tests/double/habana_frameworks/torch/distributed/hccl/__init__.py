"""D-31: the backend ``hccl`` of torch.distributed, whose collectives Gloo carries over the memory of the device's tensors.

All ranks are on this machine. Source: ``distributed/hccl/__init__.py`` of the bridge: it is registered with the extended
API, for ``hpu``. That each operator of ``c10d`` takes tensors of the device follows from how vllm-gaudi 0.26.0 calls it
(``distributed/device_communicators/hpu_communicator.py``, ``v1/worker/hpu_worker.py`` 747).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

_DEVICE, _HOST = torch.device("hpu"), torch.device("cpu")


def _create(options: Any, of_group: Any) -> ProcessGroupGloo:
    del of_group
    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo._timeout = options.timeout
    return ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo)


torch.distributed.Backend.register_backend("hccl", _create, devices=["hpu"], extended_api=True)

_OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "barrier"),
    *("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_", "scatter_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"),
)


def _run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator with host tensors that alias those of the device, and returns the latter."""
    given: dict[int, torch.Tensor] = {}
    aliases: list[torch.Tensor] = []

    def aliased(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [aliased(item) for item in value]
        if isinstance(value, torch.ScriptObject):
            return _on_host(value)
        if not isinstance(value, torch.Tensor):
            return value
        aliases.append(torch.ops.hpu_double.as_cpu(value) if value.device.type == "hpu" else value)
        given[id(aliases[-1])] = value
        return aliases[-1]

    def returned(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(returned(item) for item in value)
        return given[id(value)] if isinstance(value, torch.Tensor) else value

    operator = getattr(torch.ops.c10d, name)
    return returned(operator(*map(aliased, args), **{key: aliased(value) for key, value in kwargs.items()}))


def _on_host(value: Any) -> Any:
    """A group whose backend takes host tensors, for a group; any other object as it is."""
    if "ProcessGroup" not in str(value._type()):
        return value
    group = ProcessGroup.unbox(value)
    found = ProcessGroup(group.rank(), group.size())
    found._register_backend(_HOST, ProcessGroup.BackendType.GLOO, group._get_backend(_DEVICE))
    found._set_group_name(group.group_name)
    return found.boxed()


_LIBRARY = torch.library.Library("c10d", "IMPL")
for _name in _OPERATORS:
    _LIBRARY.impl(_name, partial(_run, _name), "HPU")
