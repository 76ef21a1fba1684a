"""The headers that answers may have, as the API's description shows them. Must not set one: what makes the answer does."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _always(description: str, **schema: object) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": {"type": "string", **schema}}


# What is declared for a status is in each of its answers where it is `required`.
HEADERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Accept": _always("What would have been accepted (RFC 9110, section 15.5.16).", const="application/json"),
        "Accept-Encoding": _always("What would have been accepted.", const="identity"),
        "Cache-Control": _always("Nothing is kept by anybody on the way.", const="no-store"),
        "ETag": _always("The version of what is visible here; attempts and leases do not move it.", pattern='^"v[0-9]+"$'),
        "Idempotent-Replayed": {
            "description": "There only where the same request, under the same Idempotency-Key, had this answer before.",
            "schema": {"type": "string", "const": "true"},
        },
        "Location": _always("Where the call's effect is looked at; it takes `wait_s`.", pattern="^/v1/sessions/"),
        "Retry-After": _always("Seconds to wait before asking again.", pattern="^[1-9][0-9]*$"),
        "WWW-Authenticate": _always("How to say who calls.", const="Bearer"),
    }
)


def sends(*names: str) -> dict[str, Any]:
    """Return the declaration of these headers, as part of one of FastAPI's `responses=`.

    Raises:
        KeyError: a header is not in the table.
    """
    return {"headers": {name: {"$ref": f"#/components/headers/{_known(name)}"} for name in sorted(names)}}


def _known(name: str) -> str:
    if name not in HEADERS:
        raise KeyError(name)
    return name
