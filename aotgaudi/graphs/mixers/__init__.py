"""Mixers: what a family of models needs for its layers to attend over a paged cache. Offline only."""
