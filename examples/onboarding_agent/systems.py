"""The outside systems of the onboarding: identities, permissions, and a mail queue that can hang. Must not know Countermand."""

import asyncio
import sqlite3

from fastapi import APIRouter, FastAPI, HTTPException
from starlette.responses import JSONResponse

from examples.tool_server import Asked, JsonObject, Key, Once, serve

TABLES_SQL = """
CREATE TABLE users (name TEXT PRIMARY KEY);
CREATE TABLE permissions (id INTEGER PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL);
CREATE TABLE mails (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
"""


def identities(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return the identity provider; a user whom permissions still name cannot be deleted."""
    router = APIRouter()

    @router.post("/users")
    async def create_user(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            if database.execute("INSERT INTO users VALUES (?) ON CONFLICT DO NOTHING", (asked["user"],)).rowcount == 0:
                raise HTTPException(409, "there is a user of that name")
            return {"name": asked["user"]}

        return once.do(key, asked, act)

    @router.post("/users/delete")
    async def delete_user(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            created = once.result_of(asked["forward_key"])
            if created is None:
                return {}  # null compensation: nothing was done, so undoing it is a success
            if database.execute("SELECT 1 FROM permissions WHERE name = :name", created).fetchone():
                raise HTTPException(409, "the user still has permissions")
            database.execute("DELETE FROM users WHERE name = :name", created)
            return created

        return once.do(key, asked, act)

    return router


def permissions(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return the authorization service."""
    router = APIRouter()

    @router.post("/permissions")
    async def assign(key: Key, asked: Asked) -> JSONResponse:
        insert = "INSERT INTO permissions (name, role) VALUES (:user, :role)"
        return once.do(key, asked, lambda: {"id": database.execute(insert, asked).lastrowid})

    @router.post("/permissions/revoke")
    async def revoke(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            assigned = once.result_of(asked["forward_key"]) or {"id": None}
            database.execute("DELETE FROM permissions WHERE id = :id", assigned)
            return assigned

        return once.do(key, asked, act)

    return router


def mail(database: sqlite3.Connection, once: Once) -> APIRouter:
    """Return a queue of mails that leave at night; until then they can be cancelled."""
    router = APIRouter()
    is_up = asyncio.Event()
    is_up.set()

    @router.post("/mails")
    async def queue_mail(key: Key, asked: Asked) -> JSONResponse:
        await is_up.wait()  # while it hangs nobody is answered; the call is on its way all the same
        return once.do(key, asked, lambda: {"id": database.execute("INSERT INTO mails (name) VALUES (:user)", asked).lastrowid})

    @router.post("/mails/cancel")
    async def cancel_mail(key: Key, asked: Asked) -> JSONResponse:
        def act() -> JsonObject:
            queued = once.result_of(asked["forward_key"]) or {"id": None}
            database.execute("DELETE FROM mails WHERE id = :id", queued)
            return queued

        return once.do(key, asked, act)

    @router.post("/mail-service/{state}")
    async def switch(state: str) -> JsonObject:
        """Let the queue hang, or be `up` again."""
        if state == "up":
            is_up.set()
        else:
            is_up.clear()
        return {"mail_service": state}

    return router


def create_app() -> FastAPI:
    """Make the systems, on a database that is gone when they end; a real one outlives them."""
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES_SQL)
    once = Once(database)
    app = FastAPI()
    for system in (identities, permissions, mail):
        app.include_router(system(database, once))

    @app.get("/")
    async def look() -> JsonObject:
        """Return what a person would find."""
        return {
            "users": [name for (name,) in database.execute("SELECT name FROM users ORDER BY rowid")],
            "permissions": [f"{name}: {role}" for name, role in database.execute("SELECT name, role FROM permissions ORDER BY id")],
            "mails": [name for (name,) in database.execute("SELECT name FROM mails ORDER BY id")],
        }

    return app


if __name__ == "__main__":
    serve(create_app(), port=9102)
