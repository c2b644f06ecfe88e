"""The kernels. Triton is imported with them, so nothing imports this before a kernel is needed."""
