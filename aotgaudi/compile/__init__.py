"""Offline: what is missing, and the workers that make it."""
