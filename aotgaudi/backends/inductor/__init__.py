"""PyTorch AOTInductor on the CPU: the embedded default."""
