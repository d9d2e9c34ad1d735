"""vllm-gaudi: vLLM with the plugin for Intel Gaudi, whose graphs are recipes, one for each shape.

Facts about the bridge are numbered as in docs/reference/hpu-contract.md; those about the plugin name its files at 091bbad.
Nothing of this has run on a card.
"""
