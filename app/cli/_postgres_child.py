"""Become initdb or postgres: give up root, ask to be told when the parent dies, then exec. Run by path in an isolated interpreter.

Must not import the service or anything outside the standard library, and never returns to Python once the program runs.

Arguments: PARENT_PID DEATH_SIGNAL HOME OWNED... -- PROGRAM ARGUMENT...
    DEATH_SIGNAL is the number of the signal that the program gets when the parent is gone. HOME is the folder around the OWNED ones,
    which must belong to whoever the program runs as.
"""

import ctypes
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

NOBODY = 65534  # Postgres refuses uid 0; this one exists wherever there is a Linux
CLONE_NEWUSER = 0x10000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> NoReturn:
    """Prepare this process and exec the program; ends with 1 and one line on stderr when that cannot be done."""
    split = arguments.index("--")
    parent, death_signal = int(arguments[0]), signal.Signals(int(arguments[1]))
    home, owned = Path(arguments[2]), [Path(each) for each in arguments[3:split]]
    program = arguments[split + 1 :]
    try:
        if os.geteuid() == 0:
            _give_up_root(home, owned)
        _follow(parent, death_signal)
        os.execv(program[0], program)  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"FATAL:  {program[0]}: {error}")


def _give_up_root(home: Path, owned: list[Path]) -> None:
    """Let the program see another uid than 0: in a user namespace, where files stay root's, else by becoming nobody."""
    if _may_unshare():
        for path in owned:
            _give(path, 0, 0)
        _enter_user_namespace()
        return
    for path in owned:
        _give(path, NOBODY, NOBODY)
    if home.stat().st_uid == 0:
        home.chmod(stat.S_IMODE(home.stat().st_mode) | 0o011)  # nobody must pass through it, and need not read it
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    for path in owned:
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            sys.exit(f"FATAL:  started as root, so Postgres runs as uid {NOBODY}, which cannot reach {path}: choose another data directory")


def _give(path: Path, uid: int, gid: int) -> None:
    """Make `path` and all in it belong to `uid`; the top comes last, so that an interrupted walk is walked again."""
    if path.stat().st_uid == uid:
        return
    for folder, folders, files in os.walk(path, topdown=False):
        for name in (*folders, *files):
            os.chown(Path(folder, name), uid, gid, follow_symlinks=False)
    os.chown(path, uid, gid)


def _may_unshare() -> bool:
    """Try in a throw-away child: containers often refuse, and a namespace without its maps is a dead end."""
    child = os.fork()
    if child == 0:
        try:
            _enter_user_namespace()
        except (OSError, AttributeError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _enter_user_namespace() -> None:
    """Show this process's uid and gid 0 as nobody's, to itself and to what it becomes."""
    if _libc().unshare(CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} 0 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} 0 1", encoding="ascii")


def _follow(parent: int, death_signal: signal.Signals) -> None:
    """Have the kernel send `death_signal` when the parent's thread ends; after the change of uid, which would cancel it.

    Where the kernel is no Linux the next start looks for what was left over instead.
    """
    if sys.platform != "linux":
        return
    if death_signal is signal.SIGINT:
        # Kept pending until Postgres has its handlers: without that, a parent that dies in these milliseconds would go unnoticed.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _libc().prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("FATAL:  the parent process has gone")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main(sys.argv[1:])
