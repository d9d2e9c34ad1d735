"""What a machine can build and serve, and which lines of the contract with Gaudi's bridge hold there.

`machine` looks at any machine, `trial` compiles on it, and `hpu` examines a Gaudi.
"""
