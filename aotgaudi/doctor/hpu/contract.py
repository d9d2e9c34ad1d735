"""The contract with the bridge: what we rely on, line by line, and how certain public sources are about it.

docs/reference/hpu-contract.md has the same table with sources, and docs/reliability.md also says what follows if a line does
not hold. A check of ``aotgaudi doctor --hpu`` examines every line. Reports from devices may change a line's mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Mark = Literal["confirmed", "inferred", "uncertain"]
"""Read in public source or the maker's documents; inferred from these; or neither."""


@dataclass(frozen=True, slots=True)
class ContractLine:
    """Something that we rely on.

    Attributes:
        statement: What holds.
        mark: How certain sources are, before anybody has run it on a device.
        otherwise: What follows if it does not hold.
        is_needed: Whether nothing can be built or served if it does not hold.
    """

    statement: str
    mark: Mark
    otherwise: str
    is_needed: bool = False

    @property
    def consequence(self) -> str:
        """What follows if the line does not hold, for people."""
        return f"not usable: {self.otherwise}" if self.is_needed else self.otherwise


LINES: Mapping[str, ContractLine] = MappingProxyType(
    {
        "K-01": ContractLine(
            "variables that are set after `import torch` have no effect",
            "confirmed",
            "variables are set before torch is imported all the same",
        ),
        "K-02": ContractLine(
            "bridge and torch are of the same release of torch",
            "confirmed",
            "the bridge cannot be imported: use the torch of the same image",
            is_needed=True,
        ),
        "K-03": ContractLine(
            "PT_HPU_LAZY_MODE=0 is the mode of torch.compile, without HPU graphs",
            "confirmed",
            "HPU graphs are not used in any mode",
        ),
        "K-04": ContractLine(
            "`hpu_backend` is registered once torch._dynamo is imported",
            "confirmed",
            "the backend is imported by name",
        ),
        "K-05": ContractLine(
            "the backend takes the options that we pass",
            "confirmed",
            "graphs cannot be compiled as they must be; the observation names the option",
            is_needed=True,
        ),
        "K-06": ContractLine(
            "the backend can be called directly, without Dynamo",
            "inferred",
            'graphs reach it through Dynamo: `target.frontend = "direct"` is refused',
        ),
        "K-08": ContractLine(
            "keys do not depend on what was compiled before", "confirmed", "keys are pinned, if K-09 holds"
        ),
        "K-09": ContractLine(
            "where they do, pinning FX's counter makes them repeat",
            "inferred",
            "no recipe would be found again",
            is_needed=True,
        ),
        "K-10": ContractLine(
            "equal layers in a row have one key",
            "uncertain",
            "recipes that a program needs beyond its units' are collected, too",
        ),
        "K-12": ContractLine(
            "hits and misses are told by the keys of recipes",
            "confirmed",
            "that recipes are used is proved by the count of compiled graphs alone",
        ),
        "K-13": ContractLine(
            "names are <H>_<L>_syn<V>, and V is the device's capability",
            "confirmed",
            "recipes cannot be told from other files",
            is_needed=True,
        ),
        "K-15": ContractLine(
            "an empty metadata is a miss", "inferred", "directories are made of complete pairs alone"
        ),
        "K-16": ContractLine(
            "compiled graphs are counted, found recipes are not",
            "confirmed",
            "it could not be proved that nothing was compiled",
            is_needed=True,
        ),
        "K-17": ContractLine(
            "single operators run outside graphs, in a cache and a count of their own",
            "inferred",
            "operators outside graphs could be compiled unseen; none may run there",
        ),
        "K-18": ContractLine(
            "without eager fallback, an operator that is not lowered is an error",
            "confirmed",
            "fallbacks are counted (cpu_fallback)",
        ),
        "K-19": ContractLine(
            "the operators of our graphs are lowered",
            "inferred",
            "the operators that are named would run on the CPU, or not at all",
            is_needed=True,
        ),
        "K-20": ContractLine(
            "integers keep 32 bits, doubles are floats", "confirmed", "nothing relies on the loss"
        ),
        "K-21": ContractLine(
            "index_copy_ into an input is done in place",
            "confirmed",
            "each step would copy the whole KV cache",
            is_needed=True,
        ),
        "K-22": ContractLine(
            "PT_HPU_DISALLOW_TORCH_COMPILE forbids compiling at run time",
            "confirmed",
            "a guard cannot use the flag; compilations are counted",
        ),
        "K-23": ContractLine(
            "a flag that is set for a while stays set after an exception",
            "confirmed",
            "flags are never set for a while",
        ),
        "K-24": ContractLine(
            "fused attention gives what attention gives", "inferred", "plain attention is used"
        ),
        "K-25": ContractLine(
            "a card belongs to one process, and is free when that ends",
            "confirmed",
            "a card is named by its module id",
        ),
        "K-26": ContractLine(
            "recipes that come into the directory after the import are found",
            "inferred",
            "directories are filled before processes start",
        ),
        "K-27": ContractLine(
            "the cache's setting has three fields, from about 1.22 on four",
            "inferred",
            "three fields are written, always",
        ),
        "K-29": ContractLine(
            "different graphs have different keys",
            "confirmed",
            "one graph would be run with the recipe of another",
            is_needed=True,
        ),
        "K-31": ContractLine(
            "another process finds all recipes, and compiles nothing",
            "inferred",
            "what one process has compiled would be of no use to another",
            is_needed=True,
        ),
        "K-32": ContractLine(
            "no constants are stored beside recipes",
            "uncertain",
            "a copy of the recipes would lack its constants; `collect` refuses them by name",
            is_needed=True,
        ),
        "K-33": ContractLine(
            "an HPU graph that is run for warm-up gives the outputs of before",
            "confirmed",
            "HPU graphs are not used",
        ),
        "K-34": ContractLine(
            "a view cannot be the output of a cluster, its copy can",
            "confirmed",
            "outputs need not be copied",
        ),
        "K-35": ContractLine(
            "flushing blocks until recipes are stored", "confirmed", "a builder waits until the files settle"
        ),
        "K-36": ContractLine(
            "recipes are found in a directory that cannot be written to",
            "uncertain",
            "recipes could only be served from where somebody can change them",
            is_needed=True,
        ),
        "K-37": ContractLine(
            "results agree with the CPU's", "inferred", "answers would be wrong", is_needed=True
        ),
        "K-38": ContractLine(
            "the bridge's hash of the libraries does not tell them apart",
            "confirmed",
            "it is a guard besides our own digests",
        ),
        "K-39": ContractLine(
            "the sampler's operators agree with the CPU's on whole vocabularies",
            "uncertain",
            "tokens are sampled on the CPU",
        ),
        "K-40": ContractLine(
            "attention over a flat list of blocks agrees with the CPU's",
            "uncertain",
            "another form of decode attention is needed",
        ),
        "K-41": ContractLine(
            "figures of free memory follow what is allocated",
            "inferred",
            "memory cannot be planned by these figures",
        ),
        "K-42": ContractLine(
            "a graph of a single operator leaves a recipe",
            "uncertain",
            "the key is `uncached`: compiled at every start",
        ),
        "K-43": ContractLine(
            "rows beyond the lengths in fused attention are numbers",
            "inferred",
            "what is beyond the lengths is masked before it is stored",
        ),
        "K-44": ContractLine(
            "an index of -1 is the last row, and no error",
            "inferred",
            "padding indices are rows of a dummy block",
        ),
        "K-45": ContractLine(
            "once a shape is traced as dynamic, earlier shapes get other keys, too",
            "inferred",
            "a closed table is a closed set of graphs without VLLM_T_COMPILE_DYNAMIC_SHAPES=false, too",
        ),
        "K-46": ContractLine(
            "what our backend has compiled, another process serves, and compiles nothing",
            "inferred",
            "`build` and `serve` would fail in the same way; the observation says how",
            is_needed=True,
        ),
    }
)
