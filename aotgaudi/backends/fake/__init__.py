"""A backend without a device, for tests of everything around one. It ships, so that users can test too.

Artifacts are deterministic bytes. A unit whose label holds ``!fail``, ``!hang``, ``!die`` or ``!wrong``
misbehaves in that way; every compile appends its key to the file named by the flag ``journal``, if given.
"""
