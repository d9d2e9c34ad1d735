"""Runs a model: makes an engine, its tokenizer and its templates from a bundle and a model directory.

`aotgaudi.llm.api.LLM` is the Python API, which users import from `aotgaudi`. `aotgaudi serve` uses the same parts.
"""
