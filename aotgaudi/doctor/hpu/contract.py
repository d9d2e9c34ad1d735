"""The contract with the bridge: what we rely on, line by line, and how sure public sources let us be.

The same table, with sources, is docs/reference/hpu-contract.md. Every line is examined by a check of ``aotgaudi doctor
--hpu``; what reports from devices say of it may change its mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Mark = Literal["confirmed", "inferred", "uncertain"]
"""Read in public source or the maker's documents; inferred from that; or neither."""


@dataclass(frozen=True, slots=True)
class ContractLine:
    """What we rely on.

    Attributes:
        statement: What holds.
        mark: How sure sources let us be, before anybody has run it on a device.
        is_needed: Whether nothing can be built or served where it does not hold.
    """

    statement: str
    mark: Mark
    is_needed: bool = False


LINES: Mapping[str, ContractLine] = MappingProxyType(
    {
        "K-01": ContractLine("variables that are set after `import torch` have no effect", "confirmed"),
        "K-02": ContractLine("bridge and torch are of the same release of torch", "confirmed", True),
        "K-03": ContractLine(
            "PT_HPU_LAZY_MODE=0 is the mode of torch.compile, without HPU graphs", "confirmed"
        ),
        "K-04": ContractLine("`hpu_backend` is registered once torch._dynamo is imported", "confirmed"),
        "K-05": ContractLine("the backend takes the options that we pass", "confirmed", True),
        "K-06": ContractLine("the backend can be called directly, without Dynamo", "inferred"),
        "K-08": ContractLine("keys do not depend on what was compiled before", "confirmed"),
        "K-09": ContractLine("where they do, pinning FX's counter makes them repeat", "inferred", True),
        "K-10": ContractLine("equal layers in a row have one key", "uncertain"),
        "K-12": ContractLine("hits and misses are told by the keys of recipes", "confirmed"),
        "K-13": ContractLine("names are <H>_<L>_syn<V>, and V is the device's capability", "confirmed", True),
        "K-15": ContractLine("an empty metadata is a miss", "inferred"),
        "K-16": ContractLine("compiled graphs are counted, found recipes are not", "confirmed", True),
        "K-17": ContractLine(
            "single operators run outside graphs, in a cache and a count of their own", "inferred"
        ),
        "K-18": ContractLine(
            "without eager fallback, an operator that is not lowered is an error", "confirmed"
        ),
        "K-19": ContractLine("the operators of our graphs are lowered", "inferred", True),
        "K-20": ContractLine("integers keep 32 bits, doubles are floats", "confirmed"),
        "K-21": ContractLine("index_copy_ into an input is done in place", "confirmed", True),
        "K-22": ContractLine("PT_HPU_DISALLOW_TORCH_COMPILE forbids compiling at run time", "confirmed"),
        "K-23": ContractLine("a flag that is set for a while stays set after an exception", "confirmed"),
        "K-24": ContractLine("fused attention gives what attention gives", "inferred"),
        "K-25": ContractLine("a card belongs to one process, and is free when that ends", "confirmed"),
        "K-26": ContractLine("recipes that come into the directory after the import are found", "inferred"),
        "K-27": ContractLine("the cache's setting has three fields, from about 1.22 on four", "inferred"),
        "K-29": ContractLine("different graphs have different keys", "confirmed", True),
        "K-31": ContractLine("another process finds all recipes, and compiles nothing", "inferred", True),
        "K-32": ContractLine("no constants are stored beside recipes", "uncertain", True),
        "K-33": ContractLine("an HPU graph that is run for warm-up gives the outputs of before", "confirmed"),
        "K-34": ContractLine("a view cannot be the output of a cluster, its copy can", "confirmed"),
        "K-35": ContractLine("flushing blocks until recipes are stored", "confirmed"),
        "K-36": ContractLine("recipes are found in a directory that cannot be written to", "uncertain", True),
        "K-37": ContractLine("results agree with the CPU's", "inferred", True),
        "K-38": ContractLine("the bridge's hash of the libraries does not tell them apart", "confirmed"),
        "K-39": ContractLine(
            "the sampler's operators agree with the CPU's on whole vocabularies", "uncertain"
        ),
        "K-40": ContractLine("attention over a flat list of blocks agrees with the CPU's", "uncertain"),
        "K-41": ContractLine("figures of free memory follow what is allocated", "inferred"),
        "K-42": ContractLine("a graph of a single operator leaves a recipe", "uncertain"),
    }
)
