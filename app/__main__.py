"""Run `python3 -m app VERB ...` on a bare clone: make the environment where it is missing, then hand over to `app.cli`.

Must not import anything but the standard library before the hand-over, nor use syntax that an older Python cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_PYTHON = (3, 11)
CLONE = Path(__file__).resolve().parent.parent
ENVIRONMENT = CLONE / ".venv"
# Names the locks that are wholly installed. Absent: somebody else made the environment.
STAMP = ENVIRONMENT / "countermand.stamp"
# The stamp while an installer is at work. Found later, one was killed there: installers take a half-copied package for a whole one.
UNFINISHED = "unfinished\n"
PRODUCT_LOCK = "requirements.lock"
DEVELOPER_LOCK = "requirements-dev.lock"
INSTALLER_LOCK = "requirements-uv.lock"
DEVELOPER_VERBS = frozenset({"test", "check", "python"})
# Counts the steps from one interpreter into the environment's. A twin that installs more may cost a second one; a fault would never end.
ENTERED = "COUNTERMAND_ENVIRONMENT_ENTERED"
MAX_ENTERED = 3
INSTALL_SECONDS = 1_800  # a slow link and pip without uv: 45 s were measured on a good one
LOCK_SECONDS = INSTALL_SECONDS
LOCK_POLL_SECONDS = 0.1
COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt}


class SetupError(Exception):
    """The environment cannot be made; the message is one line for the person at the terminal."""


def main() -> None:
    """Make sure that the packages are there, then run the verb.

    Exits with 2 and one line on stderr when the environment cannot be made.
    """
    if sys.version_info < OLDEST_PYTHON:
        _refuse("Python 3.11 or newer is needed, this is {}.{}".format(*sys.version_info[:2]))
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        _ensure_environment(is_developer=verb in DEVELOPER_VERBS)
        if verb == "python":
            _become(sys.executable, sys.argv[2:])
        _hand_over()
    except SetupError as error:
        _refuse(str(error))


def _hand_over() -> None:
    """Call the command line proper; a package that went missing from our environment makes the next start repair it."""
    try:
        from app.cli import main as run
    except ModuleNotFoundError as error:
        if not _is_in_clone_environment() or (error.name or "app").partition(".")[0] == "app":
            raise
        STAMP.write_text(UNFINISHED, encoding="ascii")
        raise SetupError(f"{error.name} has gone from {ENVIRONMENT}; run the command again to repair it") from error
    run()


def _ensure_environment(*, is_developer: bool) -> None:
    """Return where this interpreter has what is needed, else go over into `.venv`, made or repaired first."""
    entered = int(os.environ.pop(ENTERED, "0"))
    if not (CLONE / "pyproject.toml").exists():
        return  # an installed package, not a clone: whoever installed it brought the dependencies
    lock = CLONE / (DEVELOPER_LOCK if is_developer else PRODUCT_LOCK)
    if _is_in_clone_environment():
        if _is_stamped(lock) or (not STAMP.exists() and _is_complete(is_developer=is_developer)):
            return
    elif _is_complete(is_developer=is_developer):
        return
    if entered == MAX_ENTERED:
        raise SetupError(f"{ENVIRONMENT} keeps changing while it is entered; remove it and try again")
    if not _is_stamped(lock):
        _make_environment(lock)
    os.environ[ENTERED] = str(entered + 1)
    _become(str(_environment_python()), ["-m", "app", *sys.argv[1:]])


def _is_in_clone_environment() -> bool:
    return Path(sys.prefix).resolve() == ENVIRONMENT.resolve()


def _environment_python() -> Path:
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _is_stamped(lock: Path) -> bool:
    """Tell whether `.venv` holds exactly what `lock` says now."""
    try:
        lines = STAMP.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return _stamp_line(lock) in lines and os.access(_environment_python(), os.X_OK)


def _stamp_line(lock: Path) -> str:
    try:
        return f"{hashlib.sha256(lock.read_bytes()).hexdigest()}  {lock.name}"
    except OSError as error:
        raise SetupError(f"cannot read {lock}: {error.strerror}") from error


def _is_complete(*, is_developer: bool) -> bool:
    """Tell whether the running interpreter has every package that pyproject.toml asks for, e.g. in a container or by `uv sync`."""
    import tomllib

    project = tomllib.loads((CLONE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    if is_developer:
        wanted += project["optional-dependencies"]["dev"]
    # An extra may name the project itself, to include another extra; those may be missing where the caller has a better source.
    return all(_is_installed(requirement) for requirement in wanted if not requirement.startswith(project["name"] + "["))


def _is_installed(requirement: str) -> bool:
    """Judge one requirement such as `sqlalchemy[asyncio]>=2.1,<3`; what this cannot read counts as missing."""
    parts = re.fullmatch(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;.*)?", requirement)
    if parts is None:
        return False
    try:
        installed = _release(importlib.metadata.version(parts[1]))
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(_admits(clause.strip(), installed) for clause in parts[2].split(",") if clause.strip())


def _admits(clause: str, installed: tuple[int, ...]) -> bool:
    parts = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", clause)
    return parts is not None and COMPARISONS[parts[1]](installed, _release(parts[2]))


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without trailing zeros so that 2.0 equals 2."""
    numbers = re.match(r"[\d.]*\d", version)
    release = [int(part) for part in numbers[0].split(".") if part] if numbers else []
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def _make_environment(lock: Path) -> None:
    """Create `.venv` where it is missing or broken and install `lock`, one process at a time.

    Raises:
        SetupError: the folder cannot be written, Python lacks venv, or every installer failed.
    """
    try:
        with _turn() as turn:
            if _is_stamped(lock):
                return  # another process did it while this one waited
            _say(f"making {ENVIRONMENT} from {lock.name}, once; this takes from half a minute to three")
            if not _is_environment_sound():
                _create_environment()
            STAMP.write_text(UNFINISHED, encoding="ascii")
            _install(lock, turn)
            _write_stamp(lock)
    except OSError as error:
        raise SetupError(f"cannot make {ENVIRONMENT}: {error.strerror or error}") from error


def _is_environment_sound() -> bool:
    """Tell whether `.venv` can be built upon: no installer was killed in it, and its interpreter runs and is new enough."""
    if STAMP.exists() and STAMP.read_text(encoding="ascii") == UNFINISHED:
        return False
    question = "import sys; sys.exit(sys.prefix == sys.base_prefix or sys.version_info < (3, 11))"
    try:
        return subprocess.run([_environment_python(), "-c", question], check=False, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _create_environment() -> None:
    """Make an empty `.venv`, over the remains of an earlier one; Debian packs the parts that this needs separately."""
    has_installer = _uv() is not None or _has_own_pip() or importlib.util.find_spec("ensurepip") is not None
    if not has_installer or importlib.util.find_spec("venv") is None:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        raise SetupError(f"this Python has no venv; on Debian and Ubuntu it comes with: apt-get install {package}")
    import venv

    venv.EnvBuilder(clear=True, symlinks=os.name != "nt").create(ENVIRONMENT)


def _install(lock: Path, turn: int) -> None:
    """Install with uv from the PATH, else with uv fetched by pip, else with pip; every file is checked against its hash."""
    python = str(_environment_python())
    from_lock = ["--quiet", "--no-deps", "--require-hashes", "--requirement"]
    with_uv = ["pip", "install", "--python", python, *_uv_options(), *from_lock, str(lock)]
    uv, uv_lock = _uv(), CLONE / INSTALLER_LOCK
    if uv is not None and _runs([uv, *with_uv], turn):
        return
    pip = [*_pip(python, turn), "install", "--disable-pip-version-check", "--no-input", *from_lock]
    if uv is None and uv_lock.exists() and _runs([*pip, str(uv_lock)], turn, is_quiet=True) and _runs([python, "-m", "uv", *with_uv], turn):
        return
    if not _runs([*pip, str(lock)], turn):
        raise SetupError(f"could not install {lock.name}: see the lines above")


def _pip(python: str, turn: int) -> list[str]:
    """Return the start of a pip command for `.venv`: by this interpreter's pip, else by one put there first (8 s of work)."""
    if _has_own_pip():
        return [sys.executable, "-m", "pip", "--python", python]
    if not _runs([python, "-m", "ensurepip"], turn, is_quiet=True):
        raise SetupError("neither uv nor pip could be started; on Debian and Ubuntu pip comes with: apt-get install python3-venv")
    return [python, "-m", "pip"]


def _has_own_pip() -> bool:
    return _is_installed("pip>=22.3")  # the first with --python


def _uv() -> str | None:
    return shutil.which("uv")


def _uv_options() -> list[str]:
    """Do without uv's cache where the home folder cannot be written: uv takes that for an error.

    Compile at once where imports may not write bytecode: else every start would compile everything again (3.5 s measured).
    """
    has_cache = "UV_CACHE_DIR" in os.environ or os.access(Path("~").expanduser(), os.W_OK)
    return ([] if has_cache else ["--no-cache"]) + (["--compile-bytecode"] if sys.dont_write_bytecode else [])


def _runs(command: list[str], turn: int, *, is_quiet: bool = False) -> bool:
    """Run one command with its output on stderr; it keeps our turn, so that nobody meddles after we were killed."""
    output = subprocess.DEVNULL if is_quiet else 2
    kept = () if os.name == "nt" else (turn,)
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=INSTALL_SECONDS, pass_fds=kept
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _write_stamp(lock: Path) -> None:
    """Say what is installed; the developer's lock is resolved under the product's, so it holds that one too."""
    locks = [lock] if lock.name == PRODUCT_LOCK else [lock, CLONE / PRODUCT_LOCK]
    fresh = STAMP.with_suffix(".new")
    fresh.write_text("".join(_stamp_line(each) + "\n" for each in locks), encoding="ascii")
    fresh.replace(STAMP)


@contextlib.contextmanager
def _turn() -> Iterator[int]:
    """Hold the clone's lock file, waiting for whoever has it; yields its descriptor."""
    descriptor = os.open(CLONE / ".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        if not _try_lock(descriptor):
            _say(f"waiting for another process that is making {ENVIRONMENT}")
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise SetupError(f"another process has been making {ENVIRONMENT} for {LOCK_SECONDS} s; stop it and try again")
                time.sleep(LOCK_POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _become(python: str, arguments: list[str]) -> NoReturn:
    """Go on as another interpreter with this one's folder, variables, signals and exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execve(python, [python, *arguments], os.environ)  # noqa: S606 (the point is to be that process)
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the child's to answer
    sys.exit(subprocess.call([python, *arguments]))


def _say(message: str) -> None:
    sys.stderr.write(f"countermand: {message}\n")
    sys.stderr.flush()


def _refuse(message: str) -> NoReturn:
    _say(message)
    sys.exit(2)


if __name__ == "__main__":
    main()
