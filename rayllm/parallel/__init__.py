"""What the ranks of an engine share: process groups, collectives, and memory of weights and between GPUs."""
