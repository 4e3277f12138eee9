"""The CPU kernels, compiled by Numba, and the small runtime they share."""
