"""The build system for the graphs that a static-shape LLM server must compile."""

__version__ = "0.1.0"
