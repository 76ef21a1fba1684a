"""Make what is compared with in `.bench/`: packages from a hash-pinned lock, Restate's server from npm. Must not touch the service's own.

What cannot be had is left out and said; the rest of the bench does without it.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.lines import CLONE

FOLDER = CLONE / ".bench"
LOCK = CLONE / "bench" / "requirements.lock"
ENVIRONMENT = FOLDER / "venv"
NPM = FOLDER / "npm"
RESTATE_VERSION = "1.7.12"
INSTALL_SECONDS = 900
VERSIONS = (
    "from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in ('dbos', 'restate-sdk', 'aiohttp', 'uvloop')), sep='\\n')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What there is to compare with; `python` runs clients and endpoint too, with or without uvloop."""

    python: Path
    has_packages: bool
    restate: Path | None
    versions: dict[str, str]
    missing: tuple[str, ...]


def prepare() -> Comparison:
    """Make or find everything; seconds at the first time, with a network."""
    FOLDER.mkdir(exist_ok=True)
    has_packages = _has_packages()
    restate = _restate()
    missing = []
    if not has_packages:
        missing.append("DBOS, Restate and aiohttp: bench/requirements.lock could not be installed")
    if restate is None:
        missing.append("Restate: its server could not be had from npm")
    python = ENVIRONMENT / "bin" / "python" if has_packages else Path(sys.executable)
    return Comparison(
        python=python,
        has_packages=has_packages,
        restate=restate if has_packages else None,
        versions=_versions(python, restate) if has_packages else {},
        missing=tuple(missing),
    )


def none() -> Comparison:
    """Return what there is when nothing was made."""
    return Comparison(python=Path(sys.executable), has_packages=False, restate=None, versions={}, missing=())


def _has_packages() -> bool:
    """Install the lock where that was not done yet."""
    stamp, wanted = ENVIRONMENT / "lock.sha256", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return True
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    uv, python = shutil.which("uv"), str(ENVIRONMENT / "bin" / "python")
    from_lock = ["--quiet", "--no-deps", "--require-hashes", "--requirement", str(LOCK)]
    if uv is None:
        is_made = _runs(sys.executable, "-m", "venv", str(ENVIRONMENT))
        is_installed = is_made and _runs(python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *from_lock)
    else:
        is_made = _runs(sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENT))
        is_installed = is_made and _runs(uv, "pip", "install", "--python", python, *from_lock)
    if is_installed:
        stamp.write_text(wanted, encoding="ascii")
    return is_installed


def _restate() -> Path | None:
    """Install Restate's server where that was not done yet; the programs lie in packages named by platform."""
    folder = NPM / RESTATE_VERSION
    npm = shutil.which("npm")
    if not _servers(folder) and npm is not None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = ("--no-package-lock", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder))
        _runs(npm, "install", *flags, f"@restatedev/restate-server@{RESTATE_VERSION}")
    return next(iter(_servers(folder)), None)


def _servers(folder: Path) -> list[Path]:
    return sorted(folder.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))


def _versions(python: Path, restate: Path | None) -> dict[str, str]:
    told = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True, timeout=60)
    pairs = dict(line.split(" ", 1) for line in told.stdout.splitlines())
    return pairs if restate is None else {**pairs, "restate-server": RESTATE_VERSION}


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=2, stderr=2, timeout=INSTALL_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
