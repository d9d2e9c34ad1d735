"""Servers that are not ours: what a launch of one is, and what each of them needs. Starts none, imports none."""
