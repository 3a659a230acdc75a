"""Projections: which kernel takes which shape, and the kernels."""
