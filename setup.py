"""The packages of the distribution; all else is in pyproject.toml.

They are listed here because benchmarks/ is installed as `rayllm_benchmarks`, a name that setuptools does not find by
itself.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rayllm*"]), *find_packages("kernels"), "rayllm_benchmarks"],
    package_dir={"rayllm_kernels": "kernels/rayllm_kernels", "rayllm_benchmarks": "benchmarks"},
)
