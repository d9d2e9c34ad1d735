"""``aotgaudi doctor --hpu``: examines on a device what we rely on, line by line of the contract with the bridge.

``examination`` runs the ``checks``, each of which has the ``lab`` run ``probes``, every one in a process of its own, and
judges what they saw; ``report`` is what is told. The same probes run on a device and, in our tests, on the double.
"""
