"""What a machine can build and serve, and, on a Gaudi, which lines of the contract with the bridge hold there.

``machine`` looks at any machine, ``hpu`` examines a Gaudi.
"""
