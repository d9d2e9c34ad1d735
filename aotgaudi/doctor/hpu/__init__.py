"""``aotgaudi doctor --hpu``: examines on a device what we rely on, line by line of the contract with the bridge.

`examination` runs the checks of `device`, `recipes` and `lowering`. A check has the `lab` run probes, each in its own
process, and judges what they saw; `report` is the result. The same probes run on a device and, in our tests, on the double.
"""
