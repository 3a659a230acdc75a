"""Benchmarks as scripts; an installed package has this folder as `rayllm_benchmarks`, for `rayllm bench`."""
