"""What every endpoint needs that does or undoes something: each key once, whatever is repeated. Must not know what is done."""

import json
import os
import socket
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Header, Request
from starlette.responses import JSONResponse, Response

JsonObject = dict[str, Any]
Key = Annotated[str, Header(alias="Idempotency-Key", min_length=1)]  # without one a call is refused: it could not be told from a repeat
Asked = Annotated[JsonObject, Body()]

ANSWERS_SQL = "CREATE TABLE answers (key TEXT PRIMARY KEY, asked TEXT, status INTEGER NOT NULL, answer TEXT NOT NULL)"


class Once:
    """What was answered under which key, in the database of the effects themselves, so that both are written or neither is."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.execute(ANSWERS_SQL)

    def do(self, key: str, asked: JsonObject, act: Callable[[], JsonObject]) -> JSONResponse:
        """Act and answer, the first time a key comes; answer the same ever after."""
        text = json.dumps(asked, sort_keys=True)
        with self._database:  # one transaction, rolled back if `act` raises: then the key may come again
            known = self._database.execute("SELECT asked, status, answer FROM answers WHERE key = ?", (key,)).fetchone()
            if known is None:
                known = (text, 200, json.dumps(act()))
                self._database.execute("INSERT INTO answers (key, asked, status, answer) VALUES (?, ?, ?, ?)", (key, *known))
        asked_before, status, answer = known
        if asked_before not in {None, text}:
            return JSONResponse({"error": "this key came with another body before"}, 422)
        return JSONResponse(json.loads(answer), status)

    def result_of(self, forward_key: str) -> JsonObject | None:
        """Return what a call did that is to be undone, or None if it did nothing: then it never will, should it still be on its way."""
        refusal = json.dumps({"error": "this call was undone before it came"})
        insert = "INSERT INTO answers (key, status, answer) VALUES (?, 409, ?) ON CONFLICT DO NOTHING"
        self._database.execute(insert, (forward_key, refusal))
        status, answer = self._database.execute("SELECT status, answer FROM answers WHERE key = ?", (forward_key,)).fetchone()
        return dict(json.loads(answer)) if status == 200 else None


def serve(app: FastAPI, port: int) -> None:
    """Listen on loopback, on the port named in PORT if there is one, and print every call."""

    @app.middleware("http")
    async def tell(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        answered = await answer(request)
        print(answered.status_code, request.method, request.url.path, request.headers.get("Idempotency-Key", ""), flush=True)
        return answered

    with socket.create_server(("127.0.0.1", int(os.environ.get("PORT", port)))) as bound:
        print(f"listening on http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[bound])
