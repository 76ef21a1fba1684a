"""The embedded Postgres against every set of binaries found: it keeps what it acknowledged and never outlives its owner.

Must not use the suite's own server: each test starts, kills and restarts its own.
"""

import asyncio
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import asyncpg
import pytest

from app.cli.embedded_postgres import CHILD, PostgresError, all_binaries, embedded_postgres, find_binaries, major_version

LAUNCHER = CHILD.with_name("embedded_postgres.py")
NOBODY = 65_534
WAIT_SECONDS = 60
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

# Loads the launcher by path: the package around it would bring every dependency of the service, which another user's Python lacks.
DRIVER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("launcher", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
sys.modules["launcher"] = launcher
spec.loader.exec_module(launcher)
with launcher.embedded_postgres(Path(sys.argv[2]), bin_dir=Path(sys.argv[3])) as dsn:
    print(dsn, flush=True)
    sys.stdin.read()
"""

# Makes the kernel answer EPERM to unshare, as the default profile of most container engines does.
REFUSE_UNSHARE = """
import ctypes, platform, struct
number = {"x86_64": 272, "aarch64": 97}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


@pytest.fixture(scope="module", params=all_binaries(), ids=lambda binaries: f"postgres{major_version(binaries)}")
def binaries(request: pytest.FixtureRequest) -> Path:
    """Name each directory of binaries in turn."""
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def pristine(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one data directory with an empty table `written`, for tests to copy: initdb is the slow part."""
    home = tmp_path_factory.mktemp("pristine") / "data"
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        execute(dsn, "CREATE TABLE written (writer integer, number integer)")
    return home


@pytest.fixture
def home(pristine: Path, tmp_path: Path) -> Path:
    """Make a data directory of the test's own."""
    return shutil.copytree(pristine, tmp_path / "data")


def execute(dsn: str, sql: str) -> str:
    """Run one statement and return the first value of its first row as text."""

    async def on_own_connection() -> str:
        connection = await asyncpg.connect(dsn, timeout=WAIT_SECONDS)
        try:
            return str(await connection.fetchval(sql))
        finally:
            await connection.close()

    return asyncio.run(on_own_connection())


def postmaster_pid(home: Path) -> int:
    """Read the server's process id, as Postgres wrote it."""
    return int((home / "cluster" / "postmaster.pid").read_text().splitlines()[0])


def wait_until_gone(descriptor: int) -> None:
    """Wait for the process behind a pidfd to end, and fail if it does not."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    gone = poll.poll(WAIT_SECONDS * 1_000)
    os.close(descriptor)
    assert gone, f"the process still runs after {WAIT_SECONDS} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Who runs the other process: which Python, which copy of the launcher, after what preparation, as which user."""

    python: str = sys.executable
    launcher: Path = LAUNCHER
    before: str = ""
    uid: int | None = None


OURSELVES = Interpreter()


@contextmanager
def another_process(home: Path, binaries: Path, run_by: Interpreter = OURSELVES) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a server from a process of its own; yields that process and the DSN, and ends both."""
    process = subprocess.Popen(
        [run_by.python, "-c", run_by.before + DRIVER, run_by.launcher, home, binaries],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        user=run_by.uid,
        group=run_by.uid,
        extra_groups=None if run_by.uid is None else [],
    )
    with process:
        try:
            dsn = cast("IO[str]", process.stdout).readline().strip()
            assert dsn, "the other process started no server"
            yield process, dsn
            cast("IO[str]", process.stdin).close()
            process.wait(WAIT_SECONDS)
        finally:
            process.kill()


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may pass through; pytest's own are private to the user who runs it."""
    with tempfile.TemporaryDirectory(prefix="countermand-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def may_nobody_run(program: Path) -> bool:
    """Tell whether uid 65534 can reach and run a program: a clone below a private home folder keeps it out."""
    try:
        return subprocess.run([program, "--version"], check=False, capture_output=True, user=NOBODY, group=NOBODY).returncode == 0
    except PermissionError:
        return False


def python_for_nobody() -> str:
    """Name an interpreter that uid 65534 may run."""
    for program in (Path(sys.executable).resolve(), Path("/usr/bin/python3")):
        if program.exists() and may_nobody_run(program):
            question = "import sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([program, "-c", question], check=False).returncode == 0:
                return str(program)
    pytest.skip("no Python 3.11 that another user may run")


def test_rows_are_found_when_started_again(binaries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold start makes the directory, a warm one finds what was written; variables meant for psql bend neither."""
    for name in ("PGDATA", "PGPORT", "PGUSER", "PGDATABASE", "PGHOST"):
        monkeypatch.setenv(name, "9")
    home = tmp_path / "not there" / "data"
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        execute(dsn, "CREATE TABLE kept AS SELECT 42 AS value")
        settings = {name: execute(dsn, f"SHOW {name}") for name in ("fsync", "listen_addresses", "server_encoding", "timezone")}
    assert settings == {"fsync": "on", "listen_addresses": "", "server_encoding": "UTF8", "timezone": "UTC"}
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        assert execute(dsn, "SELECT value FROM kept") == "42"
        assert int(execute(dsn, "SHOW max_connections")) >= 200
    assert not (home / "cluster" / "postmaster.pid").exists()


def test_folders_are_private_when_made(home: Path, binaries: Path) -> None:
    """Whoever reaches the socket is let in, so only the owner may reach it."""
    with embedded_postgres(home, bin_dir=binaries):
        modes = {name: (home / name).stat().st_mode & 0o777 for name in ("cluster", "socket")}
        assert modes == {"cluster": 0o700, "socket": 0o700}
        assert (home / "socket" / ".s.PGSQL.5432").stat().st_mode & 0o777 == 0o700


def test_second_start_is_refused_while_the_first_runs(home: Path, binaries: Path) -> None:
    """One line says who holds the directory; the first server does not notice."""
    with another_process(home, binaries) as (owner, dsn):
        with pytest.raises(PostgresError, match=f"in use by process {owner.pid}:") as refusal, embedded_postgres(home, bin_dir=binaries):
            pass
        assert "\n" not in str(refusal.value)
        assert execute(dsn, "SELECT 1") == "1"


def test_start_is_refused_when_the_locks_were_deleted(home: Path, binaries: Path) -> None:
    """A living server without our locks, e.g. one started by hand, is seen in postmaster.pid."""
    with another_process(home, binaries) as (_, dsn):
        for lock in ("owner.lock", "server.lock"):
            (home / lock).unlink()
        with pytest.raises(PostgresError, match="started by other means"), embedded_postgres(home, bin_dir=binaries):
            pass
        assert execute(dsn, "SELECT 1") == "1"


@needs_linux
def test_server_stops_when_its_owner_is_killed(home: Path, binaries: Path) -> None:
    """No server is left behind by a process that could not clean up."""
    with another_process(home, binaries) as (owner, _):
        server = os.pidfd_open(postmaster_pid(home))
        owner.kill()
        wait_until_gone(server)


def test_acknowledged_rows_are_found_when_the_owner_was_killed(home: Path, binaries: Path) -> None:
    """The next start waits for the dying server instead of refusing, and finds every committed row."""
    with another_process(home, binaries) as (owner, dsn):
        execute(dsn, "INSERT INTO written SELECT 1, generate_series(1, 100)")
        owner.kill()
        owner.wait(WAIT_SECONDS)
        with embedded_postgres(home, bin_dir=binaries) as again:
            assert execute(again, "SELECT count(*) FROM written") == "100"


def test_acknowledged_rows_are_found_when_the_server_was_killed(home: Path, binaries: Path) -> None:
    """Kill -9 under four writers loses nothing that was answered, and the next start copes with what lies about."""

    async def write(dsn: str, writer: int, acknowledged: list[int], enough: asyncio.Event) -> None:
        connection = await asyncpg.connect(dsn, timeout=WAIT_SECONDS)
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
            for number in range(1, 100_000):
                await connection.execute("INSERT INTO written VALUES ($1, $2)", writer, number)
                acknowledged[writer] = number
                if sum(acknowledged) > 200:
                    enough.set()
        connection.terminate()

    async def kill_under_load(dsn: str) -> list[int]:
        acknowledged, enough = [0] * 4, asyncio.Event()
        async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as writers:
            for writer in range(4):
                writers.create_task(write(dsn, writer, acknowledged, enough))
            await enough.wait()
            os.kill(postmaster_pid(home), signal.SIGKILL)
        return acknowledged

    with embedded_postgres(home, bin_dir=binaries) as dsn:
        acknowledged = asyncio.run(kill_under_load(dsn))
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        found = [int(execute(dsn, f"SELECT count(*) FROM written WHERE writer = {writer}")) for writer in range(4)]
    assert all(had <= now <= had + 1 for had, now in zip(acknowledged, found, strict=True)), (acknowledged, found)


def test_server_starts_when_its_old_number_belongs_to_another_program(home: Path, binaries: Path) -> None:
    """Containers hand out the same few process ids again: a postmaster.pid that names one of them is stale."""
    (home / "cluster" / "postmaster.pid").write_text(f"{os.getpid()}\n{home / 'cluster'}\n1\n5432\n\n\n\n")
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        assert execute(dsn, "SELECT 1") == "1"


def test_half_made_cluster_is_made_anew_when_initdb_was_killed(tmp_path: Path) -> None:
    """Only a whole cluster ever gets the final name."""
    home = tmp_path / "data"
    (home / "cluster.new" / "base").mkdir(parents=True)
    (home / "cluster.new" / "PG_VERSION").write_text("15\n")
    with embedded_postgres(home) as dsn:
        assert execute(dsn, "SELECT 1") == "1"
    assert not (home / "cluster.new").exists()


def test_socket_moves_to_a_short_path_when_the_data_directory_is_deep(pristine: Path, binaries: Path, tmp_path: Path) -> None:
    """A socket's path holds 107 bytes; a deep clone has longer ones, and quotes and spaces besides."""
    deep = tmp_path / ("deep" * 20) / 'with "quotes", comma'
    home = shutil.copytree(pristine, deep / "data")
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        assert execute(dsn, "SELECT 1") == "1"
        short = Path(execute(dsn, "SHOW unix_socket_directories").strip('"'))
        assert len(str(short)) < 60
        assert short.stat().st_mode & 0o777 == 0o700
    assert not short.exists()


def test_fault_is_told_in_one_line_when_the_server_cannot_start(home: Path, binaries: Path) -> None:
    """What Postgres wrote to its log reaches the person who typed the command."""
    (home / "cluster" / "PG_VERSION").write_text("9.6\n")
    with (
        pytest.raises(PostgresError, match="database files are incompatible with server") as refusal,
        embedded_postgres(home, bin_dir=binaries),
    ):
        pass
    assert "\n" not in str(refusal.value)
    with pytest.raises(PostgresError, match="database files are incompatible"), embedded_postgres(home, bin_dir=binaries):
        pass


def test_ctrl_c_is_not_for_the_server_when_it_hits_the_process_group(home: Path, binaries: Path) -> None:
    """The service drains its sessions after Ctrl-C and needs its database for that."""
    with embedded_postgres(home, bin_dir=binaries):
        assert os.getpgid(postmaster_pid(home)) != os.getpgid(0)


@needs_root
@needs_linux
def test_files_stay_roots_when_started_by_root(home: Path, binaries: Path) -> None:
    """Nothing is handed to another user where the kernel lets us have a user namespace."""
    if subprocess.run(["/usr/bin/unshare", "--user", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("user namespaces are refused here")
    with embedded_postgres(home, bin_dir=binaries) as dsn:
        execute(dsn, "CREATE TABLE made_by_root ()")
        assert {path.stat().st_uid for path in home.rglob("*")} == {0}
        assert Path(f"/proc/{postmaster_pid(home)}").stat().st_uid == 0


@needs_root
@needs_linux
@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="the filter knows two machines' system calls")
def test_server_runs_as_nobody_when_root_is_refused_a_namespace(pristine: Path, binaries: Path) -> None:
    """As in most containers: only the cluster and its socket change hands, and back again once namespaces are to be had."""
    if not may_nobody_run(binaries / "postgres"):
        pytest.skip("these binaries lie where another user may not go")
    with open_folder() as folder:
        home = shutil.copytree(pristine, folder / "data")
        with another_process(home, binaries, Interpreter(before=REFUSE_UNSHARE)) as (_, dsn):
            execute(dsn, "INSERT INTO written VALUES (1, 1)")
            assert Path(f"/proc/{postmaster_pid(home)}").stat().st_uid == NOBODY
            assert (home / "cluster").stat().st_uid == NOBODY
            assert home.stat().st_uid == 0
        with embedded_postgres(home, bin_dir=binaries) as dsn:
            assert execute(dsn, "SELECT count(*) FROM written") == "1"


@needs_root
@needs_linux
def test_server_starts_and_dies_with_its_owner_when_not_root(binaries: Path) -> None:
    """An ordinary user needs no privilege at all."""
    if not may_nobody_run(binaries / "postgres"):
        pytest.skip("these binaries lie where another user may not go")
    with open_folder() as folder:
        for program in (LAUNCHER, CHILD):
            shutil.copy(program, folder)
        (folder / "nobodys").mkdir()
        os.chown(folder / "nobodys", NOBODY, NOBODY)
        home = folder / "nobodys" / "data"
        nobody = Interpreter(python=python_for_nobody(), launcher=folder / LAUNCHER.name, uid=NOBODY)
        with another_process(home, binaries, nobody) as (owner, dsn):
            assert execute(dsn, "SELECT 1") == "1"
            server = os.pidfd_open(postmaster_pid(home))
            owner.kill()
            wait_until_gone(server)


def test_start_is_refused_when_not_on_the_main_thread(tmp_path: Path) -> None:
    """The kernel ends the server with the thread that started it: a worker thread's end would be a surprise."""
    caught: list[BaseException] = []

    def start() -> None:
        try:
            with embedded_postgres(tmp_path / "data"):
                pass
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert "main thread" in str(caught[0])
    assert not (tmp_path / "data").exists()


def test_binaries_are_refused_when_the_named_directory_lacks_them(tmp_path: Path) -> None:
    """A setting that points nowhere is an error, not a reason to look elsewhere."""
    with pytest.raises(PostgresError, match="does not hold initdb and postgres"):
        find_binaries(tmp_path)


def test_packaged_binaries_come_first_when_there_are_several() -> None:
    """The same version for everybody, whatever the machine brings; Debian's is the fallback."""
    found = all_binaries()
    packaged = [directory for directory in found if "embedded_postgres" in directory.parts]
    assert found[: len(packaged)] == packaged
    assert find_binaries() == found[0]
    assert find_binaries(found[-1]) == found[-1]
    assert all(major_version(directory) >= 15 for directory in found)
