"""``aotgaudi doctor --hpu``: examines on a device what we rely on, line by line of the contract with the bridge.

`report` runs the checks of `device`, `recipes`, `lowering` and `whole`, and holds the result. A check has the `lab` run
probes, each in its own process, and judges what they observed. The same probes run on a device and, in our tests, on the
double.
"""
