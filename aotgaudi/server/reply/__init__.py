"""Finds reasoning, content and calls of tools in a model's text as it is generated."""
