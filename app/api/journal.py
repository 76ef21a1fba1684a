"""The routes of a session's journal: read it, have it verified. Must not change what was recorded."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response, StreamingResponse

from app.api import schemas
from app.api.cursors import bad_cursor
from app.api.dependencies import Engine, EngineDependency, OperatorOrAuditor, authenticate
from app.api.problems import problem_responses
from app.api.render import NOT_KEPT, json_response
from app.api.strict_json import PlainInteger, SessionIdPath, only_query
from app.domain.journal import Verifier, entry_json, export_line, time_text
from app.domain.json_text import Json
from app.domain.model import JournalHead, Principal, SessionId
from app.storage import journal, views

MAX_PAGE = 1_000
JSON_LINES = "application/jsonl"
JSON_LINES_NAMES = frozenset({JSON_LINES, "application/x-ndjson", "application/json-lines"})

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1/sessions/{session_id}/journal", tags=["journal"], dependencies=[Depends(authenticate)])


@router.get(
    "",
    operation_id="getJournal",
    responses={
        200: {"model": schemas.JournalView, "content": {JSON_LINES: {"schema": {"type": "string", "description": "One entry a line."}}}},
        **problem_responses("bad_cursor"),
    },
    dependencies=[Depends(only_query("limit", "cursor"))],
)
async def get_journal(
    request: Request,
    principal: OperatorOrAuditor,
    engine: EngineDependency,
    session_id: SessionIdPath,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 200,
    cursor: Annotated[str | None, Query(max_length=20)] = None,
) -> Response:
    """Return a session's journal, oldest first: a page as JSON, or all of it as JSON Lines where Accept asks for that."""
    after_seq = _read_cursor(cursor)
    async with engine.database.snapshot(principal.org) as tx:
        await views.session(tx, principal, session_id)
        if _wants_lines(request):
            return StreamingResponse(_lines(engine, principal, session_id, after_seq), headers=NOT_KEPT, media_type=JSON_LINES)
        page = await journal.read_page(tx, session_id, after_seq, limit + 1)
    next_cursor = str(page[limit - 1].seq) if len(page) > limit else None
    return json_response({"items": [entry_json(entry) for entry in page[:limit]], "next_cursor": next_cursor})


@router.get(
    "/verify",
    operation_id="verifyJournal",
    responses={200: {"model": schemas.VerificationView}},
    dependencies=[Depends(only_query())],
)
async def verify_journal(principal: OperatorOrAuditor, engine: EngineDependency, session_id: SessionIdPath) -> Response:
    """Recompute a session's whole chain and hold it against the session's own note of where the chain stands."""
    async with engine.database.snapshot(principal.org) as tx:
        session = await views.session(tx, principal, session_id)
        verifier = Verifier(principal.org, session_id)
        async for entry in journal.read_all(tx, session_id):
            verifier.read(entry)
        found = verifier.finish(session.head)
    return json_response(
        {
            "valid": found.valid,
            "entry_count": found.entry_count,
            "first_bad_seq": found.first_bad_seq,
            "message": found.message,
            "head": _head_json(session.head),
        }
    )


def _head_json(head: JournalHead) -> Json:
    return {"seq": head.seq, "hash": head.digest.hex(), "at": None if head.at is None else time_text(head.at)}


async def _lines(engine: Engine, principal: Principal, session_id: SessionId, after_seq: int) -> AsyncIterator[bytes]:
    """Yield an export line by line, a page in memory and no connection held while the reader is slow."""
    while True:
        async with engine.database.snapshot(principal.org) as tx:
            page = await journal.read_page(tx, session_id, after_seq, journal.PAGE_ENTRIES)
        if not page:
            return
        for entry in page:
            yield export_line(entry)
        after_seq = page[-1].seq


def _wants_lines(request: Request) -> bool:
    accepted = {part.split(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")}
    return bool(accepted & JSON_LINES_NAMES)


def _read_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        raise bad_cursor()
    return int(cursor)
