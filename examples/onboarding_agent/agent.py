"""Onboard a customer: a user, permissions, a welcome mail, each resting on the one before. Must not undo anything itself."""

import os
import sys
from typing import Any

import httpx

from examples.http_tool import http_tool
from examples.saga import HOLD_SECONDS, Saga

SYSTEMS = os.environ.get("SYSTEMS_URL", "http://127.0.0.1:9102")


def undo_at(path: str, description: str) -> dict[str, Any]:
    """Describe a tool that nobody registered.

    Its undo finds the call by the forward key alone, which is known before the call is made: so the undo is the same whether or not the
    outcome is known, and takes away only what this very call made, never a user of the same name who was there before.
    """
    args = {"forward_key": {"$ref": "effect#/forward_key"}}
    return {"reversibility": "reversible", "compensation": {"url": f"{SYSTEMS}{path}", "description": description, "args": args}}


def onboard(saga: Saga, user: str) -> None:
    """Take the steps in the order in which they depend on one another; they are undone in the reverse of it."""
    saga.call("create_user", {"user": user}, http_tool(f"{SYSTEMS}/users"), **undo_at("/users/delete", f"delete user {user}"))
    print(f"{user} created")
    granted = {"user": user, "role": "customer"}
    saga.call(
        "assign_permissions", granted, http_tool(f"{SYSTEMS}/permissions"), **undo_at("/permissions/revoke", f"revoke what {user} may do")
    )
    print(f"{user} may do what a customer may")
    mail = {"user": user, "text": "Welcome!"}
    saga.call("send_welcome_email", mail, http_tool(f"{SYSTEMS}/mails"), **undo_at("/mails/cancel", f"cancel the welcome to {user}"))
    print(f"welcome to {user} queued")


def main(session_id: str, user: str) -> None:
    """Run once and say how it ended."""
    http = httpx.Client(
        base_url=os.environ["COUNTERMAND_URL"],
        headers={"Authorization": f"Bearer {os.environ['COUNTERMAND_AGENT_KEY']}"},
        timeout=HOLD_SECONDS + 10,
    )
    saga = Saga(http, session_id)
    try:
        with saga:
            onboard(saga, user)
    except Exception as error:  # noqa: BLE001 (whatever it was, the run is over and what it did is undone; a person wants to read how it ended)
        print(f"failed: {type(error).__name__}: {error}")
    print(f"{session_id} is {saga.state()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
