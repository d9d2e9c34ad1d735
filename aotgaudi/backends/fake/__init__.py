"""A backend without a device, for tests of everything around one. It ships, so that users can test too.

Artifacts are deterministic bytes. A unit whose label holds ``!fail``, ``!hang``, ``!die`` or ``!wrong``
misbehaves in that way, one with ``!slow`` takes 0.2 s, and one with ``!random`` ends in other bytes each time.
Every compile appends its key to the file named by the flag ``journal``, if given.
"""
