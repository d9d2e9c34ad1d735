"""vLLM as a guest, by the sources of vLLM 0.32; what it does on a CPU was seen, what it does on a GPU is read."""
