"""Gaudi without a device: cards and software of a machine, what its environment does to code, and recipes.

docs/reference/hpu-contract.md has what the bridge (Intel's plugin of torch for Gaudi) promises; the numbers K-nn and H-nn
in this package refer to it. Nothing here imports torch or habana_frameworks, or acquires a card.
"""
