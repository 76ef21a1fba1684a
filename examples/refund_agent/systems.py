"""The outside systems of the refund: orders, a ledger, tickets and a mail service that can be down. Must not know Countermand."""

import sqlite3

from fastapi import APIRouter, FastAPI, HTTPException
from starlette.responses import JSONResponse

from examples.tool_server import Asked, JsonObject, Key, Once, serve

TABLES_SQL = """
CREATE TABLE ledger (credit_id TEXT PRIMARY KEY, amount INTEGER NOT NULL, reverses TEXT UNIQUE);
CREATE TABLE tickets (ticket INTEGER PRIMARY KEY, status TEXT NOT NULL);
CREATE TABLE mails (recipient TEXT NOT NULL);
CREATE TABLE mail_service (is_up INTEGER NOT NULL);
INSERT INTO tickets VALUES (9104, 'open');
INSERT INTO mail_service VALUES (1);
"""


def ledger(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return an append-only ledger: what takes a credit back is a line of its own, not an erasure."""
    router = APIRouter()

    def append(amount: int, reverses: str | None = None) -> str:
        (count,) = database.execute("SELECT count(*) FROM ledger").fetchone()
        line = f"cr_9104_{count + 1}" if reverses is None else f"rv_9104_{count + 1}"
        database.execute("INSERT INTO ledger VALUES (?, ?, ?)", (line, amount, reverses))
        return line

    @router.post("/credits")
    async def issue_credit(key: Key, asked: Asked) -> JSONResponse:
        return once.do(key, asked, lambda: {"credit_id": append(asked["amount"])})

    @router.post("/credits/reverse")
    async def reverse_credit(key: Key, asked: Asked) -> JSONResponse:
        """Reverse the credit that is named, or the one that was issued under a forward key, if any was."""

        def act() -> JsonObject:
            credit = once.result_of(asked["forward_key"]) if "forward_key" in asked else asked
            if credit is None:
                return {"reversal": None}  # null compensation: nothing was done, so undoing it is a success
            (amount,) = database.execute("SELECT amount FROM ledger WHERE credit_id = ?", (credit["credit_id"],)).fetchone()
            return {"reversal": append(-amount, reverses=credit["credit_id"])}

        return once.do(key, asked, act)

    return router


def tickets(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return the tickets."""
    router = APIRouter()

    def put(ticket: int, status: str) -> JsonObject:
        (previous,) = database.execute("SELECT status FROM tickets WHERE ticket = ?", (ticket,)).fetchone()
        database.execute("UPDATE tickets SET status = ? WHERE ticket = ?", (status, ticket))
        return {"ticket": ticket, "previous": previous}

    @router.post("/tickets/status")
    async def set_status(key: Key, asked: Asked) -> JSONResponse:
        return once.do(key, asked, lambda: put(asked["ticket"], asked["status"]))

    @router.post("/tickets/status/restore")
    async def restore_status(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            change = once.result_of(asked["forward_key"]) if "forward_key" in asked else asked
            return {} if change is None else put(change["ticket"], change["previous"])

        return once.do(key, asked, act)

    return router


def mail(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return the mail service; what it has sent nobody can take back."""
    router = APIRouter()

    @router.post("/mails")
    async def send_mail(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            if not database.execute("SELECT is_up FROM mail_service").fetchone()[0]:
                raise HTTPException(503, "the mail service is down")
            number = database.execute("INSERT INTO mails VALUES (?)", (asked["to"],)).lastrowid
            return {"mail_id": f"mail_{number}"}

        return once.do(key, asked, act)

    @router.post("/mail-service/{state}")
    async def switch(state: str) -> JsonObject:
        """Let the mail service be `up` or `down`."""
        with database:
            database.execute("UPDATE mail_service SET is_up = ?", (state == "up",))
        return {"mail_service": state}

    return router


def create_app() -> FastAPI:
    """Make the systems, on a database that is gone when they end; a real one outlives them."""
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES_SQL)
    once = Once(database)
    app = FastAPI()
    for system in (ledger, tickets, mail):
        app.include_router(system(database, once))

    @app.post("/orders/look-up")
    async def look_up(asked: Asked) -> JsonObject:
        return {"order": asked["order"], "customer": "customer@example.com"}

    @app.get("/")
    async def look() -> JsonObject:
        """Return what a person would find."""
        return {
            "ledger": dict(database.execute("SELECT credit_id, amount FROM ledger ORDER BY rowid").fetchall()),
            "tickets": dict(database.execute("SELECT ticket, status FROM tickets").fetchall()),
            "mails": [to for (to,) in database.execute("SELECT recipient FROM mails ORDER BY rowid")],
        }

    return app


if __name__ == "__main__":
    serve(create_app(), port=9101)
