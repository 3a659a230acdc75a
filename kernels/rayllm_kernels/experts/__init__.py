"""Mixtures of experts: which experts a token goes through, and their products."""
