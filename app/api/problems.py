"""Every problem there is: its status, when it is answered, whether to repeat, what to do. Must not refuse anything itself.

`docs/reference/problems.md` shows this table, and the API's description is made of it; tests compare both, and find each code in the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from app.api.errors import PROBLEM_MEDIA_TYPE, STATUSES, Problem
from app.api.headers import sends
from app.domain.errors import (
    Conflict,
    Forbidden,
    Invalid,
    Malformed,
    NotFound,
    SagaError,
    Stale,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WrongMediaType,
)


class Repeat(StrEnum):
    """Whether the same request, sent again as it is, can have another answer."""

    NO = "no"  # not before the request, or the key it is sent with, is another
    LATER = "later"  # once something else has happened, which the advice names
    YES = "yes"  # at once, or after Retry-After where the answer has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What there is to know of one code; `refusal` is the class that bears it, or the status where only the edge answers it."""

    refusal: type[SagaError] | HTTPStatus
    when: str
    repeat: Repeat
    advice: str

    @property
    def status(self) -> HTTPStatus:
        """The status that it is answered with."""
        return self.refusal if isinstance(self.refusal, HTTPStatus) else STATUSES[self.refusal]


def _no(refusal: type[SagaError] | HTTPStatus, when: str, advice: str) -> Kind:
    return Kind(refusal=refusal, when=when, repeat=Repeat.NO, advice=advice)


def _later(refusal: type[SagaError] | HTTPStatus, when: str, advice: str) -> Kind:
    return Kind(refusal=refusal, when=when, repeat=Repeat.LATER, advice=advice)


def _yes(refusal: type[SagaError] | HTTPStatus, when: str, advice: str) -> Kind:
    return Kind(refusal=refusal, when=when, repeat=Repeat.YES, advice=advice)


# Whatever else the framework refuses: its code is `http_` and the status. No path of the API is known to answer one.
ANY_OTHER: Final = "http_<status>"

PROBLEMS: Mapping[str, Kind] = MappingProxyType(
    {
        "bad_cursor": _no(Malformed, "`cursor` is none that this list gave.", "Begin the list anew, without a cursor."),
        "bad_idempotency_key": _no(
            Malformed,
            "`Idempotency-Key` is not 1 to 255 visible ASCII characters, or comes twice.",
            "Send one such key, bare or quoted.",
        ),
        "idempotency_key_required": _no(
            Malformed,
            "An intercept has neither a `step_index` nor an `Idempotency-Key`.",
            "Send one of the two; without either a repeat could not be told from a second call.",
        ),
        "incomplete_body": _yes(
            Malformed, "The body broke off, or took longer than 30 seconds.", "Send it again: nothing of it was stored."
        ),
        "malformed_json": _no(
            Malformed,
            "The body is no JSON with one meaning: bad syntax, a key twice, NaN, half a surrogate pair, nested more than 64 deep.",
            "Mend what `errors` points at; an intercept that was refused so must not run its tool.",
        ),
        "unauthenticated": _no(
            Unauthenticated,
            "No bearer key, more than one, or one that nobody holds.",
            "Send `Authorization: Bearer <key>` with a key of yours.",
        ),
        "role_not_allowed": _no(Forbidden, "The key's role may not do this.", "Use a key of a role that `detail` names."),
        "same_subject": _no(
            Forbidden,
            "Whoever's agent asked for the call wants to decide about it.",
            "Have somebody else decide, with a key of another subject.",
        ),
        "not_released_to_you": _no(
            Forbidden,
            "An operator reports on a call that was not released to them.",
            "Leave the report to the session's agent, or to `released_to`.",
        ),
        "session_not_found": _no(
            NotFound, "No such session in this org, or another agent's.", "Check the id, and whose key it is; both have the same answer."
        ),
        "effect_not_found": _no(NotFound, "The session has no such step.", "Look at the session: its effects bear their steps."),
        "undo_not_found": _no(NotFound, "The session has no such undo.", "Take the id from the session's `undo_stack`."),
        "approval_not_found": _no(NotFound, "The call never asked a person.", "Report on it as on any call: it needs no decision."),
        "escalation_not_found": _later(
            NotFound, "The session is not halted: nobody has to look at it.", "Nothing; `state` says where it is."
        ),
        "tool_not_found": _no(NotFound, "No such tool is registered, or not this version.", "Register it, or look at `GET /v1/tools`."),
        "unknown_path": _no(HTTPStatus.NOT_FOUND, "Nothing is served at this path.", "Compare it with the API's description."),
        "method_not_allowed": _no(
            HTTPStatus.METHOD_NOT_ALLOWED, "The path does not take this method.", "Use one that `Allow` and `allow` name."
        ),
        "already_decided": _no(
            Conflict,
            "The question was decided by somebody else or otherwise, has expired, or was cancelled or used up.",
            "Look at `state` and `decided_by`; a decision stands.",
        ),
        "already_released": _no(
            Conflict,
            "The approved call was released before, by another request.",
            "Do not run it. Whoever released it repeats the resume under its own `Idempotency-Key`.",
        ),
        "approval_expired": _no(
            Conflict,
            "The call was approved, and nobody resumed it in time; the session has failed.",
            "Do not run it. Ask anew in a new session.",
        ),
        "not_approved": _later(
            Conflict,
            "No approval of the call stands in the journal; `state` says what became of the question.",
            "Do not run it. `pending`: wait with `GET .../effects/{step}?wait_s=`, and resume once it is approved; "
            "only then is a repeat of use. `rejected`: the effect has the reason; the run goes on without the call, or has failed. "
            "`cancelled`, `expired` (unanswered): the run has failed; ask anew in a new session.",
        ),
        "not_executing": _no(
            Conflict,
            "A report on a call that is not running: it was not released, was refused, or was reported otherwise.",
            "Look at the effect. A commit that contradicts what was said before is kept for a person.",
        ),
        "not_unknown": _no(Conflict, "The call's outcome is known; only an unknown one can be settled.", "Look at the effect."),
        "payload_changed": _no(
            Conflict,
            "Resume presented other bytes than those approved; the approval is used up and the session has failed.",
            "Do not run it. Find out who changed the payload.",
        ),
        "payload_differs": _no(
            Conflict,
            "`payload_sha256` is not the fingerprint of what waits; nothing was decided.",
            "Look at the payload again before deciding.",
        ),
        "result_differs": _no(Conflict, "The call was committed with another result.", "Look at the effect: the first result stands."),
        "runs_as_action": _no(
            Conflict,
            "A report on a call that the service executes itself.",
            "Wait for its end with `GET .../effects/{step}?wait_s=`.",
        ),
        "session_awaiting_approval": _later(
            Conflict,
            "An earlier call of the session waits for a person, or for its resume.",
            "Do not run the tool. Repeat once that call is released, or rejected with `then: continue`.",
        ),
        "session_differs": _no(
            Conflict, "The session was opened with other options.", "Leave out what differs, or take another id; options are said once."
        ),
        "session_not_active": _no(
            Conflict,
            "The session has failed or ended; `state` says how far it is. A late report was kept, if it told anything new.",
            "Do not run the tool. Work on under a new session.",
        ),
        "session_not_halted": _later(
            Conflict, "The order is for sessions that a person owns.", "Look at `state`; halt an unwind first, if that is meant."
        ),
        "session_not_unwinding": _no(Conflict, "There is no unwind to halt.", "Look at `state`; a running session is failed, not halted."),
        "session_past_deadline": _no(
            Conflict, "The session is past its `deadline_at`.", "Do not run the tool. The session is failed within moments, and unwound."
        ),
        "step_reused": _no(
            Conflict, "The step is another call: other tool, or other bytes.", "Do not run the tool. Take a new step for a new call."
        ),
        "step_settled": _no(
            Conflict,
            "The step's call failed, is unknown, was refused, or is being undone.",
            "Do not run the tool. Take a new step to try anew.",
        ),
        "undo_not_next": _later(
            Conflict, "A newer undo is not settled yet: newest first.", "Retry or skip the one in `next_undo_id` first."
        ),
        "undo_not_sent": _no(
            Conflict, "An undo that was never sent is to go to another URL.", "Register the tool with the new URL; unsent undos go there."
        ),
        "undo_settled": _no(Conflict, "The undo is done, or taken out already.", "Nothing is left to do for it; look at `state`."),
        "unsettled_effects": _later(
            Conflict,
            "Calls listed in `unsettled` are executing, unknown or waiting, and this has to come after them.",
            "Do not run the tool. Report on each of them, then repeat.",
        ),
        "version_differs": _no(
            Stale,
            "`If-Match` names another version than the current one; nothing was done.",
            "Look again, decide again, and send the new `ETag`.",
        ),
        "body_too_large": _no(TooLarge, "More than 1 MiB of body.", "Send less; keep large things elsewhere and pass where they are."),
        "payload_too_large": _no(
            TooLarge,
            "A payload, `args`, `metadata` or schema is over its own limit; `errors` points at it.",
            "Send less; keep large things elsewhere and pass where they are.",
        ),
        "unsupported_content_coding": _no(WrongMediaType, "The body is compressed.", "Send it as it is."),
        "unsupported_media_type": _no(
            WrongMediaType, "The body is not declared as JSON in UTF-8.", "Send `Content-Type: application/json`."
        ),
        "action_needs_approval": _no(
            Invalid,
            "A tool with an `action` does not require approval.",
            "Set `approval.required`: the service runs only what was released.",
        ),
        "args_too_large": _no(
            Invalid, "An undo's args, references bound, are over 256 KiB or nest too deep.", "Refer to less of the payload."
        ),
        "bad_payload_schema": _no(
            Invalid, "`payload_schema` is no JSON Schema of draft 2020-12, or refers to one outside.", "Mend what `errors` points at."
        ),
        "bad_reference": _no(
            Invalid, "A `$ref` in an undo's args is none of ours, or there are more than 32.", "Mend what `errors` points at."
        ),
        "compensation_not_allowed": _no(
            Invalid, "A `read_only` or `irreversible` tool names an undo.", "Leave it out, or choose the class that has one."
        ),
        "inline_not_allowed": _no(
            Invalid,
            "The call describes its tool where only an administrator may, or gives a registered tool another undo.",
            "Do not run the tool. Have it registered, and name nothing but it.",
        ),
        "invalid_request": _no(
            Invalid,
            "A member or parameter is unknown, missing or not acceptable.",
            "Mend what `errors` points at; a refused call must not run.",
        ),
        "key_reused": _no(
            Invalid, "The `Idempotency-Key` belongs to another request of the same method and path.", "Take a new key for a new request."
        ),
        "payload_schema": _no(
            Invalid,
            "The payload does not fit the schema that the tool is registered with.",
            "Do not run the tool. Mend the call; take the same step.",
        ),
        "reversibility_lowered": _no(
            Invalid, "The call claims a milder class than its tool's.", "Do not run the tool. A call may raise its class, never lower it."
        ),
        "step_out_of_order": _no(
            Invalid, "`step_index` is not greater than every earlier one.", "Do not run the tool. Take a step above `last_step`."
        ),
        "tool_needs_compensation": _no(
            Invalid, "A `reversible` or `compensatable` tool names no undo.", "Name one, or choose another class."
        ),
        "unresolved_reference": _no(
            Invalid,
            "A `payload#` or `effect#` reference of the undo leads nowhere.",
            "Do not run the tool. Mend the payload or the reference.",
        ),
        "url_refused": _no(
            Invalid,
            "The URL could never be called: see the egress rules.",
            "Mend it, or have its host listed in `COUNTERMAND_EGRESS_ALLOW`.",
        ),
        "internal": _yes(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "The request crashed; whether it took effect is unknown.",
            "Repeat it under the same `Idempotency-Key` or step. If it stays, search the service's log for `instance`.",
        ),
        "not_ready": _yes(Unavailable, "`GET /readyz`: the process cannot serve now; `checks` says why.", "Route nothing to it meanwhile."),
        "registry_busy": _yes(Unavailable, "Others are changing the same tool.", "Send it again."),
        "schema_missing": _later(
            Unavailable,
            "The database has not the schema that this version knows.",
            "Run `countermand migrate`, or replace this version where the schema is newer: `GET /readyz` says which.",
        ),
        "stopping": _yes(
            Unavailable,
            "The process is being stopped, and gave this request up; whether a change took effect is unknown.",
            "Repeat it under the same `Idempotency-Key` or step, at another replica or when one is back.",
        ),
        "busy": _yes(
            Unavailable,
            "More requests wait to be written than the process can write soon; nothing was done.",
            "Send it again, at another replica if there is one.",
        ),
        "storage_unavailable": _yes(
            Unavailable,
            "The database cannot answer now; whether a change took effect is unknown.",
            "Repeat it under the same `Idempotency-Key` or step: what took effect is found again.",
        ),
        ANY_OTHER: _no(HTTPStatus.BAD_REQUEST, "Anything else that the framework refuses, under its own status.", "See `detail`."),
    }
)

# Which headers a refusal has beside those of any answer.
_HEADERS: Mapping[HTTPStatus, tuple[str, ...]] = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: ("WWW-Authenticate",),
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE: ("Accept", "Accept-Encoding"),
        HTTPStatus.SERVICE_UNAVAILABLE: ("Retry-After",),
    }
)


def problem_responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the declaration of these problems by status, for FastAPI's `responses=`; `openapi` adds what every verb can answer.

    Raises:
        KeyError: a code is not in the table.
    """
    by_status: dict[HTTPStatus, list[str]] = {}
    for code in sorted(set(codes)):
        by_status.setdefault(PROBLEMS[code].status, []).append(code)
    return {int(status): _declared(status, by_status[status]) for status in sorted(by_status)}


def declared_codes(responses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the codes that `problem_responses` has put into these responses of one operation."""
    schemas = [response.get("content", {}).get(PROBLEM_MEDIA_TYPE, {}).get("schema") for response in responses.values()]
    return [code for schema in schemas if schema is not None for code in schema["allOf"][1]["properties"]["code"]["enum"]]


def _declared(status: HTTPStatus, codes: list[str]) -> dict[str, Any]:
    titles = [kind.title for kind, mapped in STATUSES.items() if mapped == status]
    of_these_codes = {"properties": {"code": {"enum": codes}}}
    schema = {"allOf": [{"$ref": f"#/components/schemas/{Problem.__name__}"}, of_these_codes]}
    return {
        "description": titles[0] if titles else status.phrase,
        "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}},
        **sends("Cache-Control", *_HEADERS.get(status, ())),
    }
