"""Every knob of the service, with unit, default and reason. Must be read only by `main` and `cli`: everything below gets values."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]


def read_secret(path: Path) -> str:
    """Return what a secret's file says, without its final newline.

    Raises:
        ValueError: it cannot be read, or says nothing; the text is one line and holds no part of the secret.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret:
        raise ValueError(f"{path} is empty")
    return secret


class Settings(BaseSettings):
    """Environment variables `COUNTERMAND_<NAME>`, or a `.env` file; see docs/reference/settings.md."""

    model_config = SettingsConfigDict(env_prefix="COUNTERMAND_", env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True)

    database_url_file: Path | None = None
    """A file that holds `database_url`: its password then stands neither in the environment nor in what lists it. Not both."""

    # After its file, which is looked at when this one is validated. The library's own `secrets_dir` takes every setting from a
    # directory, by a file name of its choosing; a variable that names one file is what secret stores and orchestrators expect.
    database_url: Annotated[str | None, Field(validate_default=True)] = None
    """Postgres 15 or newer, `postgresql://...`; absent: an embedded Postgres under `data_dir`."""

    database_pooler: Literal["none", "transaction"] = "none"
    """What stands before `database_url`: `transaction` for a pooler that hands out connections by the transaction, as PgBouncer does."""

    listen_database_url_file: Path | None = None
    """A file that holds `listen_database_url`. Not both."""

    listen_database_url: Annotated[str | None, Field(validate_default=True)] = None
    """Where to listen for notifications: Postgres itself; absent: `database_url`, and behind a pooler nowhere, so that polling is left."""

    data_dir: Path = Path(".countermand")
    """Where the embedded Postgres keeps its files."""

    postgres_bin_dir: Path | None = None
    """A directory with `initdb` and `postgres` for the embedded Postgres; absent: the wheel's, else one that is installed."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback unless told otherwise, because keys travel in clear without a TLS proxy."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 8420
    """Port to listen on; 0 = any free one, printed at the start."""

    public_url: Annotated[str, Field(pattern=r"^(https?://[^/?#]+(/[^?#]*)?)?$")] = ""
    """Where people reach this service, e.g. behind a TLS proxy; absent: as each request names it. Stands in the commands of escalations."""

    egress_allow: str = ""
    """Comma-separated host names and CIDRs that undos and actions may reach besides globally routable addresses."""

    inline_tools: Literal["allow", "deny"] = "deny"
    """Whether agents may describe unregistered tools inline; denied, because an agent could then name its own undo."""

    lease_seconds: Annotated[float, Field(ge=1, le=3_600)] = 30.0
    """How long a worker keeps a call without a sign of life; renewed at a third of it while an attempt is in flight."""

    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """How often due calls are looked for when nothing wakes the orchestrator: what a lost notification may cost."""

    sweep_seconds: Annotated[float, Field(ge=0.05, le=3_600)] = 1.0
    """How often sessions are looked for that are silent too long or past their deadline, and questions to people past their time."""

    max_calls: Annotated[int, Field(ge=1, le=1_000)] = 64
    """Undos and actions in flight at once, per process."""

    max_calls_per_destination: Annotated[int, Field(ge=1, le=1_000)] = 16
    """Undos and actions in flight at once to one host and port, per process: an endpoint that hangs must not take every slot."""

    max_calls_per_org: Annotated[int, Field(ge=1, le=1_000)] = 32
    """Undos and actions in flight at once of one org, per process: a tenant with ten thousand due calls must not take every slot."""

    circuit_calls: Annotated[int, Field(ge=0, le=1_000)] = 5
    """Distinct calls of an org in a row that find a destination away, in one process, until it is only probed; 0 = never."""

    grace_seconds: Seconds = 10.0
    """How long calls in flight may take to end after SIGTERM before they are handed back."""

    database_connections: Annotated[int, Field(ge=2, le=500)] = 10
    """Connections for requests, per process; the orchestrator has as many of its own, and one listens."""

    database_wait_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """How long a request waits for a free connection before it is answered 503: a caller that cannot be served soon is better told so."""

    approval_ttl_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 259_200
    """How long a question to a person stays open: 72 hours. Then it expires, and the run fails; a tool's own `ttl_seconds` overrides it."""

    retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    """How long ago a session has to have ended for `prune` to delete it; absent: it has to be told, and deletes nothing otherwise."""

    session_idle_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400
    """Silence after which an active session fails, unless it says otherwise itself: a day."""

    retry_max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Retries after the first attempt (the third seed's number)."""

    retry_initial_interval_ms: Milliseconds = 100
    """First backoff interval."""

    retry_multiplier: Annotated[float, Field(ge=1, le=100)] = 2.0
    """What each further interval is multiplied with."""

    retry_max_interval_ms: Milliseconds = 5_000
    """Cap of the backoff interval."""

    attempt_timeout_ms: Annotated[int, Field(ge=1, le=600_000)] = 10_000
    """One attempt's total deadline, connecting and reading included."""

    @field_validator("database_url", "listen_database_url", mode="after")
    @classmethod
    def _from_file(cls, given: str | None, others: ValidationInfo) -> str | None:
        """Take what the file says; two sources for one secret are a mistake that must not be guessed about."""
        path = others.data.get(f"{others.field_name}_file")
        if path is None:
            return given
        variable = f"COUNTERMAND_{others.field_name}_FILE".upper()
        if given is not None:
            raise PydanticCustomError("two_sources", "set this or {variable}, not both", {"variable": variable})
        try:
            return read_secret(path)
        except ValueError as error:
            told = {"reason": str(error), "variable": variable}
            raise PydanticCustomError("secret_file", "{reason} (named by {variable})", told) from error
