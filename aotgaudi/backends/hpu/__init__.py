"""Intel Gaudi: dense decoder models in bfloat16 or float32, on one card, by torch.compile with static shapes."""
