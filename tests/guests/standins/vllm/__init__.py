"""Stands in for vLLM in the fake guest's processes: only what a witness looks for."""
