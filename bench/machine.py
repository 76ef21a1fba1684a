"""What a figure was measured on: the machine, the versions. Must not hold anything that names who owns it."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter

from app.cli.embedded_postgres import find_binaries

PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "asyncpg", "httpx", "h11", "pydantic")
SYNCS = 200
BLOCK = bytes(8_192)


def describe(directory: Path) -> dict[str, object]:
    """Return the machine and the versions; `directory` is where Postgres will write."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": round(os.getloadavg()[0], 2),
        "sync_microseconds": round(_sync_microseconds(directory)),
        "python": platform.python_version(),
        "postgres": _postgres(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    if not told.exists():
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in told.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _postgres() -> str:
    told = subprocess.run([find_binaries() / "postgres", "--version"], check=True, capture_output=True, text=True, timeout=30)
    return told.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _sync_microseconds(directory: Path) -> float:
    """Return what it takes to have one block on the disk."""
    taken: list[float] = []
    path, sync = directory / "sync", getattr(os, "fdatasync", os.fsync)  # the first is not everywhere
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            began_at = perf_counter()
            file.write(BLOCK)
            sync(file.fileno())
            taken.append(perf_counter() - began_at)
    path.unlink()
    return median(taken) * 1e6
