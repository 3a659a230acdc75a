"""`rayllm collect-env`: what a bug report needs. Values are shown of a fixed list of settings only."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata

SETTINGS = [
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
    "TOKENIZERS_PARALLELISM",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "RAY_USAGE_STATS_ENABLED",
]


def print_environment() -> None:
    """Print what a bug report needs: versions, hardware and settings, no secrets."""
    rows = [("python", platform.python_version()), ("platform", platform.platform())]
    rows += [(name, _version(name)) for name in ["rayllm", *_dependencies()]]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows += [("cpus", str(os.cpu_count())), ("memory", f"{memory:.1f} GiB")]
    rows += [(f"gpu {index}", line) for index, line in enumerate(gpus())] or [("gpus", "none found")]
    rows.append(("ray cluster", "RAY_ADDRESS is set" if os.environ.get("RAY_ADDRESS") else "RAY_ADDRESS is not set"))
    rows += [(name, os.environ[name]) for name in SETTINGS if name in os.environ]
    rows += [(name, "is set") for name in sorted(os.environ) if name.startswith("RAYLLM_")]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _dependencies() -> list[str]:
    """Packages that rayllm needs directly, extras left out, and those that bring the HTTP server."""
    try:
        requirements = metadata.requires("rayllm") or []
    except metadata.PackageNotFoundError:  # it runs from a folder
        requirements = ["torch", "ray"]
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements if "extra ==" not in requirement]
    return [*names, "starlette", "uvicorn"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def gpus() -> list[str]:
    """One line a GPU (name, memory, driver), as nvidia-smi tells it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi failed: {error}"]
    return answer.stdout.strip().splitlines()
