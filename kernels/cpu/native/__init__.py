"""What Numba compiles. Nothing here is imported before a kernel has to be compiled: Numba is slow to import."""
