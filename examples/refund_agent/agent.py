"""Refund an order: credit it, set the ticket's status, reply to the customer once a person agrees. Must not undo anything itself."""

import os
import sys

import httpx

from examples.http_tool import http_tool
from examples.saga import HOLD_SECONDS, Saga

SYSTEMS = os.environ.get("SYSTEMS_URL", "http://127.0.0.1:9101")
TICKET = 9104


def refund(saga: Saga, order: int, amount: int) -> None:
    """Take the steps. A model would choose them while it runs; the undo of each is registered before it is taken, so that is no matter."""
    found = saga.call("get_order", {"order": order}, http_tool(f"{SYSTEMS}/orders/look-up"))
    credit = saga.call("issue_credit", {"order": order, "amount": amount}, http_tool(f"{SYSTEMS}/credits"))
    print(f"{credit['credit_id']}: ${amount:,} credited to order {order}")
    ticket = saga.call("set_ticket_status", {"ticket": TICKET, "status": "refunded"}, http_tool(f"{SYSTEMS}/tickets/status"))
    print(f"ticket {TICKET}: {ticket['previous']} -> refunded")
    # The step that cannot be undone comes last: if it does not go ahead, everything before it still can be.
    print("the reply waits for a person", flush=True)
    reply = {"to": found["customer"], "text": f"${amount:,} have been credited to your order {order}."}
    mail = saga.call("send_reply", reply, http_tool(f"{SYSTEMS}/mails"))
    print(f"{mail['mail_id']} sent to {found['customer']}")


def main(session_id: str) -> None:
    """Run once and say how it ended."""
    http = httpx.Client(
        base_url=os.environ["COUNTERMAND_URL"],
        headers={"Authorization": f"Bearer {os.environ['COUNTERMAND_AGENT_KEY']}"},
        timeout=HOLD_SECONDS + 10,
    )
    saga = Saga(http, session_id)
    try:
        with saga:
            refund(saga, order=4921, amount=2500)
    except Exception as error:  # noqa: BLE001 (whatever it was, the run is over and what it did is undone; a person wants to read how it ended)
        print(f"failed: {error}")
    print(f"{session_id} is {saga.state()}")


if __name__ == "__main__":
    main(sys.argv[1])
