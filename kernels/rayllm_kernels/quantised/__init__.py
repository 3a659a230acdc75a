"""Weights in fewer bits."""
