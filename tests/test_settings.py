"""Where settings come from: the environment, and files for secrets. Must not test what the settings do."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.settings import Settings, read_secret

URL = "postgresql://robot:hunter2@127.0.0.1/x"

# The bytes of a secret's file -> what it says.
TEXTS = {
    b"secret": "secret",
    b"secret\n": "secret",
    b"secret\r\n": "secret",
    b"secret\n\n": "secret\n",
    b" secret ": " secret ",
    "geheimnis-ü\n".encode(): "geheimnis-ü",
}
UNUSABLE = {b"": "is empty", b"\n": "is empty", b"\xff": "is not UTF-8"}


@pytest.mark.parametrize("content", TEXTS)
def test_secret_is_the_file_without_its_final_newline_when_read(tmp_path: Path, content: bytes) -> None:
    """An editor's newline is no part of a password, and every other sign may be."""
    file = tmp_path / "secret"
    file.write_bytes(content)
    assert read_secret(file) == TEXTS[content]


@pytest.mark.parametrize("content", UNUSABLE)
def test_secret_is_refused_when_its_file_says_none(tmp_path: Path, content: bytes) -> None:
    """A file that was never filled is a mistake, not an empty password."""
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=UNUSABLE[content]):
        read_secret(file)


def test_database_is_the_files_when_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that container secrets are named by."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "url").write_text(f"{URL}\n", encoding="utf-8")
    monkeypatch.delenv("COUNTERMAND_DATABASE_URL", raising=False)
    monkeypatch.setenv("COUNTERMAND_DATABASE_URL_FILE", str(tmp_path / "url"))
    assert Settings().database_url == URL


def test_database_in_a_file_is_used_when_the_variable_itself_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass variables on that nobody has set; an empty one is no second source."""
    (tmp_path / "url").write_text(URL, encoding="utf-8")
    monkeypatch.setenv("COUNTERMAND_DATABASE_URL", "")
    monkeypatch.setenv("COUNTERMAND_DATABASE_URL_FILE", str(tmp_path / "url"))
    assert Settings(_env_file=None).database_url == URL


def test_two_sources_are_refused_when_both_name_a_database(tmp_path: Path) -> None:
    """Neither is guessed to be the right one, even if they agree; the refusal holds neither."""
    (tmp_path / "url").write_text(URL, encoding="utf-8")
    with pytest.raises(ValidationError) as refused:
        Settings(_env_file=None, database_url=URL, database_url_file=tmp_path / "url")
    (fault,) = refused.value.errors()
    assert fault["loc"] == ("database_url",)
    assert fault["msg"] == "set this or COUNTERMAND_DATABASE_URL_FILE, not both"


def test_password_is_not_shown_when_the_settings_are_refused(tmp_path: Path) -> None:
    """Another setting that is wrong must not bring the secret into a message."""
    (tmp_path / "url").write_text(URL, encoding="utf-8")
    with pytest.raises(ValidationError) as refused:
        Settings(_env_file=None, database_url_file=tmp_path / "url", port=-1)
    assert [fault["loc"] for fault in refused.value.errors()] == [("port",)]
    assert "hunter2" not in str(refused.value)


def test_listening_address_is_the_files_when_one_is_named(tmp_path: Path) -> None:
    """It holds the same password; a refusal names its own variable."""
    (tmp_path / "url").write_text(f"{URL}\n", encoding="utf-8")
    assert Settings(_env_file=None, listen_database_url_file=tmp_path / "url").listen_database_url == URL
    with pytest.raises(ValidationError, match="set this or COUNTERMAND_LISTEN_DATABASE_URL_FILE, not both"):
        Settings(_env_file=None, listen_database_url=URL, listen_database_url_file=tmp_path / "url")
