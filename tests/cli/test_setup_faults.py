"""Commands that cannot do their work say so in one line, and keys for development work again. Must not start a service that runs."""

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from app.cli import keys, serving
from app.cli.target import target
from app.domain.model import Role
from app.settings import Settings
from tests.conftest import with_database

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60
UNREACHABLE = "postgresql://nobody@127.0.0.1:1/nothing"
PASSWORD = "hunter2"

# A command and its settings -> its exit code and what its one line names. `{database}`: one that is not there; `{standby}`: one whose
# server should be a standby and is none; `{port}`: one that is taken; `{file}`: a file with the URL of an unreachable database.
FAULTS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "egress": ("serve", {"EGRESS_ALLOW": "10.0.0.0/99", "DATABASE_URL": UNREACHABLE}, 2, "COUNTERMAND_EGRESS_ALLOW: "),
    "scheme": ("serve", {"DATABASE_URL": f"mysql://root:{PASSWORD}@127.0.0.1/x"}, 2, "COUNTERMAND_DATABASE_URL: "),
    "sign": ("serve", {"DATABASE_URL": f"postgresql://u:{PASSWORD}/x@127.0.0.1/x"}, 2, "COUNTERMAND_DATABASE_URL: "),
    "where to listen": (
        "serve",
        {"DATABASE_URL": UNREACHABLE, "LISTEN_DATABASE_URL": f"mysql://root:{PASSWORD}@127.0.0.1/x"},
        2,
        "COUNTERMAND_LISTEN_DATABASE_URL: ",
    ),
    "no primary": ("migrate", {"DATABASE_URL": "{standby}"}, 5, "cannot be reached"),
    "missing file": ("serve", {"DATABASE_URL_FILE": "/nowhere/url"}, 2, "cannot read /nowhere/url"),
    "two sources": ("migrate", {"DATABASE_URL_FILE": "{file}", "DATABASE_URL": UNREACHABLE}, 2, "not both"),
    "unreachable by file": ("migrate", {"DATABASE_URL_FILE": "{file}"}, 5, "cannot be reached"),
    "database": ("serve", {"DATABASE_URL": "{database}"}, 2, "COUNTERMAND_DATABASE_URL: "),
    "port": ("serve", {"PORT": "{port}", "DATABASE_URL": UNREACHABLE}, 2, "(COUNTERMAND_PORT)"),
    "unreachable": ("migrate", {"DATABASE_URL": UNREACHABLE}, 5, "cannot be reached"),
}


def run(directory: Path, command: str, settings: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command with these settings and no others; bytecode goes beside its directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | {f"COUNTERMAND_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "app", command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_command_ends_with_one_line_when_it_is_not_set_up(cluster_url: str, tmp_path: Path, fault: str) -> None:
    """What is wrong and which setting it is, no traceback, no password, and an exit code that tells a mistake from an outage."""
    command, settings, code, named = FAULTS[fault]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"{database}": with_database(cluster_url, "nowhere"), "{port}": str(taken.getsockname()[1])}
        places["{standby}"] = f"{cluster_url}&target_session_attrs=standby"  # the suite's is none
        places["{file}"] = str(tmp_path / "url")
        (tmp_path / "url").write_text(f"{UNREACHABLE}\n", encoding="utf-8")
        given = {"PORT": "0"} | {name: places.get(value, value) for name, value in settings.items()}
        ended = run(tmp_path, command, given)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (code, "")
    assert line.startswith("countermand: ")
    assert named in line
    assert PASSWORD not in line


def kept_keys(directory: Path) -> Path:
    """Return where the keys for development are kept."""
    return directory / "dev-keys.json"


def names_in(directory: Path) -> list[str]:
    """Return what the files of a directory are called."""
    return [path.name for path in directory.iterdir()]


def unknown_keys() -> str:
    """Return keys that are well-formed and that no database knows, as they are kept."""
    return json.dumps({role.value: f"cm_{number:012x}_{'0' * 64}" for number, role in enumerate(Role)})


async def made_keys(directory: Path, database_url: str) -> dict[str, str]:
    """Return what `dev` would print."""
    settings = Settings(_env_file=None, data_dir=directory)
    # In a thread: the command has no loop of its own running.
    made = await asyncio.to_thread(serving._dev_keys, settings, database_url)  # noqa: SLF001 (the command goes on to serve)
    return dict(made)


async def are_known(database_url: str, made: dict[str, str]) -> bool:
    """Tell whether the database takes every one of these keys."""
    return await asyncio.to_thread(keys.are_known, database_url, list(made.values()))


UNUSABLE: dict[str, bytes] = {
    "of another database": unknown_keys().encode(),
    "no keys": json.dumps(dict.fromkeys(Role, "rubbish")).encode(),
    "keys of other types": json.dumps({role.value: None for role in Role}).encode(),
    "a role too few": json.dumps({"agent": "x"}).encode(),
    "another document": b"[]",
    "cut off": b'{"agent": "cm_',
    "empty": b"",
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("kept", UNUSABLE)
async def test_keys_are_replaced_when_the_kept_ones_are_of_no_use(database_url: str, tmp_path: Path, kept: str) -> None:
    """A database made anew, or a file that a full disk cut off, costs new keys and not a command that prints dead ones or crashes."""
    kept_keys(tmp_path).write_bytes(UNUSABLE[kept])
    made = await made_keys(tmp_path, database_url)
    assert made.keys() == {role.value for role in Role}
    assert await are_known(database_url, made)
    assert await made_keys(tmp_path, database_url) == made, "kept this time"
    assert stat.S_IMODE(kept_keys(tmp_path).stat().st_mode) == 0o600
    assert names_in(tmp_path) == [kept_keys(tmp_path).name], "nothing half-written is left"


async def test_keys_are_not_known_when_one_of_them_is_not(database_url: str, tmp_path: Path) -> None:
    """One revoked key is enough for others to be made: all four are printed."""
    made = await made_keys(tmp_path, database_url)
    assert await are_known(database_url, made)
    assert not await are_known(database_url, made | {"admin": json.loads(unknown_keys())["admin"]})


def test_database_is_waited_for_when_none_of_its_hosts_can_be_written_to(cluster_url: str) -> None:
    """A service that starts in the middle of a promotion is not told that its URL is wrong."""
    url = f"{cluster_url}&target_session_attrs=standby"
    with target(Settings(_env_file=None, database_url=url)) as found:
        assert found == url


def test_environment_is_warned_of_when_it_is_nearly_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt database would be another, empty one, and nobody would undo what is registered there."""
    for name in list(os.environ):
        if name.startswith("COUNTERMAND_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COUNTERMAND_DATABASE_URL_FLE", "/run/secrets/url")
    monkeypatch.setenv("COUNTERMAND_EGRES_ALLOW", "10.0.0.0/8")
    monkeypatch.setenv("COUNTERMAND_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", "cm_")
    with structlog.testing.capture_logs() as told:
        serving.warn_of_environment(Settings(_env_file=None))
    assert told == [
        {"event": "embedded_postgres", "log_level": "warning", "data_dir": ".countermand"},
        {
            "event": "unknown_setting",
            "log_level": "warning",
            "variable": "COUNTERMAND_DATABASE_URL_FLE",
            "meant": "COUNTERMAND_DATABASE_URL_FILE",
        },
        {"event": "unknown_setting", "log_level": "warning", "variable": "COUNTERMAND_EGRES_ALLOW", "meant": "COUNTERMAND_EGRESS_ALLOW"},
    ]
    with structlog.testing.capture_logs() as told:
        serving.warn_of_environment(Settings(_env_file=None, database_url=UNREACHABLE))
    assert [each["event"] for each in told] == ["unknown_setting", "unknown_setting"]


def test_every_setting_is_read_when_it_is_offered() -> None:
    """A setting that nothing reads would be set, and believed in."""
    sources = "".join(path.read_text(encoding="utf-8") for part in ("cli", "main.py") for path in _sources(REPOSITORY / "app" / part))
    unread = {name for name in Settings.model_fields if f"settings.{name}" not in sources}
    assert unread == {"database_url_file", "listen_database_url_file"}, "read by the settings that they stand for"


def _sources(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))
