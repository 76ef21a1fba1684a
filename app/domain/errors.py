"""Every refusal the service can give, as one tree. Must not know HTTP: `api.errors` maps each class to a status.

SagaError                 something was asked that may not be done
├── Malformed             the request cannot be read (syntax, missing header)
├── Unauthenticated       no key, or a key nobody knows
├── Forbidden             the role, or the person, may not do this at all
├── NotFound              no such thing in this org, or not yours to see
├── Conflict              the state forbids it now
├── Stale                 the version the caller saw is not the current one
├── TooLarge              more bytes than the limit
├── WrongMediaType        not `application/json`
├── Invalid               read, but a value is not acceptable
└── Unavailable           not now; try again after `retry_after_seconds`
"""

from collections.abc import Mapping
from typing import ClassVar


class SagaError(Exception):
    """A refusal with a stable `code`, a sentence for people and machine-readable `facts`.

    Args:
        code: stable snake_case word, part of the API; one code belongs to exactly one class.
        detail: what was found and what was expected, with ids; never a payload.
        facts: extension members of the problem (JSON values), e.g. `{"state": "failed"}`.
    """

    title: ClassVar[str] = "Refused"

    def __init__(self, code: str, detail: str, **facts: object) -> None:
        """Keep the parts; `str(error)` is the detail."""
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.facts: Mapping[str, object] = facts


class Malformed(SagaError):
    """The request cannot be read at all."""

    title = "The request cannot be read"


class Unauthenticated(SagaError):
    """No key was given, or one that nobody knows."""

    title = "A valid key is required"


class Forbidden(SagaError):
    """The caller is known and may not do this."""

    title = "Not allowed"


class NotFound(SagaError):
    """No such thing, or it is not the caller's to see: the same answer for both."""

    title = "Not found"


class Conflict(SagaError):
    """The state of the session or effect forbids this now."""

    title = "The state forbids this"


class Stale(SagaError):
    """The caller decided on a version that is not the current one."""

    title = "The version seen is no longer current"


class TooLarge(SagaError):
    """More bytes than the limit."""

    title = "Too large"


class WrongMediaType(SagaError):
    """The body is not `application/json`."""

    title = "Wrong media type"


class Invalid(SagaError):
    """The request was read, but a value is not acceptable."""

    title = "Not acceptable"


class Unavailable(SagaError):
    """The service cannot do this now; `retry_after_seconds` says when to try again."""

    title = "Temporarily unavailable"

    def __init__(self, code: str, detail: str, *, retry_after_seconds: int = 1, **facts: object) -> None:
        """Keep the wait beside the other parts."""
        super().__init__(code, detail, **facts)
        self.retry_after_seconds = retry_after_seconds
