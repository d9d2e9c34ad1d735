"""Instruction-set levels: the names of ``target.isa``, what the compiler may emit for each, and what a CPU needs to run it.

A level is exact. The compiler's flags (`compiler_flags`) and the CPU's features (`features`) say the same thing twice, in
the words of g++ and of /proc/cpuinfo. Nothing is added for the machine that builds, so one target is one set of bytes, and
a machine with the features never meets an instruction that it lacks. Imports no torch.

Sources: the micro-architecture levels of the x86-64 psABI (x86-64-v2, v3, v4); torch/_inductor/cpu_vec_isa.py
for the features that `VecAVX2`, `VecAVX512` and `VecAMX` assume. VNNI without AMX is not a level: it is for
products of 8-bit integers, which our graphs leave to torch's kernels (those choose at run time).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TILE_FEATURE = "amx_tile"
"""The feature whose tiles a process must request from the kernel; see runtime.py."""


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """One level. `simdlen` is in bits. `vec_isa` names torch's class of vector types.

    `has_bf16`: torch may use AVX512_BF16 conversions. `features` is sorted.
    """

    name: str
    simdlen: int
    vec_isa: str
    compiler_flags: tuple[str, ...]
    features: tuple[str, ...]
    has_bf16: bool = False

    @property
    def has_bf16_alone(self) -> bool:
        """Whether AVX512_BF16 is the best way to multiply bfloat16, since there are no tiles."""
        return self.has_bf16 and TILE_FEATURE not in self.features


_V2 = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_BF16 = (*_V4, "avx512_bf16")
_TILES = (*_BF16, "amx_bf16", "amx_int8", TILE_FEATURE, "avx512_vnni")

_MARCH_V4 = "-march=x86-64-v4"
_TILE_FLAGS = (_MARCH_V4, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

_LEVELS = (
    IsaLevel("avx2", 256, "VecAVX2", ("-march=x86-64-v3",), tuple(sorted(_V3))),
    IsaLevel("avx512", 512, "VecAVX512", (_MARCH_V4,), tuple(sorted(_V4))),
    IsaLevel(
        "avx512+bf16", 512, "VecAVX512", (_MARCH_V4, "-mavx512bf16"), tuple(sorted(_BF16)), has_bf16=True
    ),
    IsaLevel("avx512+amx", 512, "VecAMX", _TILE_FLAGS, tuple(sorted(_TILES)), has_bf16=True),
)

ISA_LEVELS: Mapping[str, IsaLevel] = MappingProxyType({level.name: level for level in _LEVELS})
"""Levels by name. Each includes the one before it."""
