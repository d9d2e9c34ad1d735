"""What to compile for, as far as the user chooses it; the rest of a target is probed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue

ExecutionMode = Literal["hpu_graphs", "lazy", "torch_compile", "eager"]

LARGEST_NUM_SMS = 4096
"""More than any device has; a larger number is a mistake."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Numbers of a whole device (a MIG slice has fewer), and their source.

    `num_sms`: streaming multiprocessors. `is_verified`: the maker's own documents state it.
    """

    num_sms: int
    source: str
    is_verified: bool = True


_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture, table of data-centre GPUs"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, table of data-centre GPUs"

DEVICE_PROFILES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "a100": DeviceProfile(108, _A100_PAPER),
        "h100": DeviceProfile(132, f"{_H100_PAPER}: H100 SXM5"),
        "h100-pcie": DeviceProfile(114, f"{_H100_PAPER}: H100 PCIe"),
        "h200": DeviceProfile(132, "SGLang issue #28706 (a running H200)", is_verified=False),
        "h20": DeviceProfile(78, "vLLM PR #52740 (from its split counts); public reports", is_verified=False),
        "b200": DeviceProfile(
            148, "vLLM PR #46718 (from its split counts); public reports", is_verified=False
        ),
        "rtx-pro-6000-blackwell": DeviceProfile(188, "NVIDIA data sheet: 24,064 CUDA cores, 128 each"),
    }
)
"""What ``target.profile`` may name. B300, GB200 and GB300 are missing because public figures disagree
(148, 152, 160): for them, and for slices, give ``target.num_sms``."""


class TargetSpec(SpecValue):
    """`isa` ``native``: the best level that the building machine has; else a named one, for a mixed fleet.

    `profile`: a device whose published numbers stand in for probing one (see ``DEVICE_PROFILES``).
    `num_sms`: its streaming multiprocessors, if there is no profile or the number differs. `execution_mode`: for hpu
    targets only (PT_HPU_LAZY_MODE and --enforce-eager).
    """

    backend: Literal["cpu", "cuda", "hpu", "fake"] = "cpu"
    isa: Literal["native", "avx2", "avx512", "avx512+bf16", "avx512+amx"] = "native"
    profile: str | None = None
    num_sms: int | None = Field(default=None, ge=1, le=LARGEST_NUM_SMS)
    execution_mode: ExecutionMode | None = None

    @property
    def resolved_num_sms(self) -> int | None:
        """Multiprocessors of the serving device: `num_sms`, else the profile's, else None.

        Never those of the building machine: a manifest is the same on every machine.
        """
        if self.num_sms is not None or self.profile is None:
            return self.num_sms
        return DEVICE_PROFILES[self.profile].num_sms

    @model_validator(mode="after")
    def _check_mode(self) -> TargetSpec:
        if self.execution_mode is not None and self.backend != "hpu":
            raise SpecError(
                "target.execution_mode", f"is given for backend {self.backend!r}", "only hpu has modes"
            )
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> TargetSpec:
        if self.profile is not None and self.profile not in DEVICE_PROFILES:
            raise SpecError(
                "target.profile",
                f"is {self.profile!r}, which is not known",
                f"one of {', '.join(DEVICE_PROFILES)}; or target.num_sms in its place",
            )
        return self
