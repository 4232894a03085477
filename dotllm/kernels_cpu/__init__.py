"""The operations on a CPU, as Numba kernels."""
