"""What a machine can build and serve, and, on a Gaudi, which lines of the contract with the bridge hold there.

``machine`` looks at any machine. On a Gaudi, ``hpu_checks`` says what is examined, ``lab`` runs each step of it in a
process of its own, ``hpu_steps`` is what runs there beside the bridge, and ``report`` writes down what was found.
"""
