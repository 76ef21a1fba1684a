"""Which calls are a worker's: find what is due, claim it, keep or give back leases. Must not read what a call is about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncpg import Record

from app.domain.circuits import Place
from app.domain.model import CallId, CallKind, OrgName, SessionId
from app.domain.turns import Queue
from app.storage.changes import Lease
from app.storage.database import Connection, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A call that this worker may act on as long as its epoch is the newest.

    `is_probe`: it was claimed to see whether its destination is back. `is_late`: it is past its deadline, and not to be sent.
    """

    org: OrgName
    session_id: SessionId
    call_id: CallId
    kind: CallKind
    destination: str
    epoch: int
    is_probe: bool = False
    is_late: bool = False

    @property
    def place(self) -> Place:
        """Where it goes, and whose it is."""
        return Place(org=self.org, destination=self.destination)


# In all of these: the statement's time, which an index can be searched by; nothing is waited for that could make it stale.
#
# From one place to the next by the index, however many calls wait at each: of an outage's ten thousand due calls none is read here. What
# waits is counted where nothing holds it; a probe is due where no worker lives that is at the last one.
LOOK_SQL = """
WITH RECURSIVE places AS (
  (
    SELECT org, destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND (org, destination) > ($1::text, $2::text)
    ORDER BY org, destination
    LIMIT 1
  )
  UNION ALL
  SELECT next.org, next.destination
  FROM places AS p
  CROSS JOIN LATERAL (
    SELECT org, destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND (org, destination) > (p.org, p.destination)
    ORDER BY org, destination
    LIMIT 1
  ) AS next
)
SELECT
  p.org, p.destination, waiting.calls AS waiting, waiting.oldest_due_at, c.org IS NOT NULL AS is_open, coalesce(c.probes, 0) AS probes,
  c.org IS NOT NULL AND NOT h.is_paused AND c.probe_at <= statement_timestamp() AND coalesce((
    SELECT leased_until <= statement_timestamp()
    FROM outgoing_calls
    WHERE org = c.org AND session_id = c.probe_session_id AND call_id = c.probe_call_id
    LIMIT 1
  ), true) AS is_probe_due
FROM (SELECT org, destination FROM places LIMIT $3) AS p
LEFT JOIN circuits AS c ON c.org = p.org AND c.destination = p.destination
CROSS JOIN LATERAL (
  SELECT EXISTS (
    SELECT FROM pauses
    WHERE (org IS NULL OR org = p.org) AND (destination IS NULL OR destination = p.destination)
  ) AS is_paused
) AS h
CROSS JOIN LATERAL (
  SELECT count(*)::integer AS calls, min(due.due_at) AS oldest_due_at
  FROM (
    SELECT due_at
    FROM outgoing_calls
    WHERE c.org IS NULL AND NOT h.is_paused
      AND org = p.org AND destination = p.destination AND due_at <= statement_timestamp()
      AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ORDER BY due_at
    LIMIT $4
  ) AS due
) AS waiting
ORDER BY p.org, p.destination
"""


async def look(connection: Connection, after: Place | None, places: int, calls: int) -> list[Queue]:
    """Return what is due and in nobody's hands, at up to `places` places that follow `after`, counting up to `calls` at each.

    Needs a dispatcher's connection. Places come in their order; fewer than were asked for are the last ones.
    """
    begin = ("", "") if after is None else (after.org, after.destination)
    return [
        Queue(
            place=Place(org=OrgName(row["org"]), destination=row["destination"]),
            waiting=row["waiting"],
            oldest_due_at=row["oldest_due_at"],
            is_open=row["is_open"],
            probes=row["probes"],
            is_probe_due=row["is_probe_due"],
        )
        for row in await connection.fetch(LOOK_SQL, *begin, places, calls)
    ]


PICK_DUE_SQL = """
SELECT due.org, due.session_id, due.call_id, due.epoch
FROM unnest($1::text[], $2::text[], $3::integer[]) AS allotted (org, destination, calls)
CROSS JOIN LATERAL (
  SELECT org, session_id, call_id, epoch
  FROM outgoing_calls
  WHERE org = allotted.org AND destination = allotted.destination AND due_at <= statement_timestamp()
    AND (leased_until IS NULL OR leased_until <= statement_timestamp())
  ORDER BY due_at
  LIMIT allotted.calls
  FOR UPDATE SKIP LOCKED
) AS due
"""


async def claim(connection: Connection, lease: Lease, allotted: Mapping[Place, int]) -> list[Claim]:
    """Lease up to so many calls at each place that are due and that no living worker holds, oldest first.

    Needs a dispatcher's connection.
    """
    places = [place.org for place in allotted], [place.destination for place in allotted]
    return await _lease(connection, lease, await connection.fetch(PICK_DUE_SQL, *places, list(allotted.values())))


# Wherever they go: they are not sent, so what holds the others, or has no room for them, is nothing to these.
PICK_LATE_SQL = """
SELECT org, session_id, call_id, epoch
FROM outgoing_calls
WHERE due_at IS NOT NULL AND deadline_at <= statement_timestamp()
  AND (leased_until IS NULL OR leased_until <= statement_timestamp())
ORDER BY deadline_at
LIMIT $1
FOR UPDATE SKIP LOCKED
"""


async def claim_late(connection: Connection, lease: Lease, limit: int) -> list[Claim]:
    """Lease up to `limit` calls past their deadline, so that they are given up. Needs a dispatcher's connection."""
    claimed = await _lease(connection, lease, await connection.fetch(PICK_LATE_SQL, limit))
    return [replace(each, is_late=True) for each in claimed]


# The call that was tried least comes first: one that fails for a reason of its own cannot keep the others from being tried. Of two replicas
# that both pick one, the second finds the count of probes moved on, and probes nothing.
PICK_PROBES_SQL = """
WITH picked AS (
  SELECT due.org, due.session_id, due.call_id, due.epoch, probe.destination, probe.probes, probe.seconds
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::float8[]) AS probe (org, destination, probes, seconds)
  CROSS JOIN LATERAL (
    SELECT org, session_id, call_id, epoch
    FROM outgoing_calls
    WHERE org = probe.org AND destination = probe.destination AND due_at <= statement_timestamp()
      AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ORDER BY attempts, due_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
  ) AS due
)
UPDATE circuits AS c
SET
  probe_at = clock_timestamp() + make_interval(secs => picked.seconds), probes = c.probes + 1,
  probe_session_id = picked.session_id, probe_call_id = picked.call_id
FROM picked
WHERE c.org = picked.org AND c.destination = picked.destination AND c.probes = picked.probes
RETURNING picked.org, picked.session_id, picked.call_id, picked.epoch
"""


async def claim_probes(connection: Connection, lease: Lease, probes: Sequence[tuple[Queue, float]]) -> list[Claim]:
    """Lease one call at each of these places whose circuit is open, and put its next probe off by so many seconds.

    Needs a dispatcher's connection. Nothing is leased where somebody else probes meanwhile, or nothing is due any more.
    """
    columns = (
        [queue.place.org for queue, _ in probes],
        [queue.place.destination for queue, _ in probes],
        [queue.probes for queue, _ in probes],
        [seconds for _, seconds in probes],
    )
    claimed = await _lease(connection, lease, await connection.fetch(PICK_PROBES_SQL, *columns))
    return [replace(each, is_probe=True) for each in claimed]


# Apart from what picks them: a planner that has to guess how many are picked would rather read the whole table to find those again.
LEASE_SQL = """
UPDATE outgoing_calls AS o
SET leased_by = $5, leased_until = clock_timestamp() + make_interval(secs => $6), epoch = o.epoch + 1
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS picked (org, session_id, call_id, epoch)
WHERE o.org = picked.org AND o.session_id = picked.session_id AND o.call_id = picked.call_id AND o.epoch = picked.epoch
RETURNING o.org, o.session_id, o.call_id, o.kind::text, o.destination, o.epoch
"""


async def _lease(connection: Connection, lease: Lease, picked: Sequence[Record]) -> list[Claim]:
    """Lease calls that this transaction has locked."""
    if not picked:
        return []
    columns = ([row[name] for row in picked] for name in ("org", "session_id", "call_id", "epoch"))
    return [
        Claim(
            org=OrgName(row["org"]),
            session_id=SessionId(row["session_id"]),
            call_id=CallId(row["call_id"]),
            kind=CallKind(row["kind"]),
            destination=row["destination"],
            epoch=row["epoch"],
        )
        for row in await connection.fetch(LEASE_SQL, *columns, lease.worker, lease.seconds)
    ]


RENEW_SQL = """
UPDATE outgoing_calls AS o
SET leased_until = CASE WHEN o.leased_by IS NOT NULL THEN clock_timestamp() + make_interval(secs => $5) END
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS mine (org, session_id, call_id, epoch)
WHERE o.org = mine.org AND o.session_id = mine.session_id AND o.call_id = mine.call_id AND o.epoch = mine.epoch
RETURNING o.call_id, o.epoch
"""


async def renew(connection: Connection, claims: Sequence[Claim], seconds: float) -> set[Claim]:
    """Prolong leases to `seconds` from now; return the claims whose calls nobody newer owns. Needs a dispatcher's connection.

    A call that was settled a moment ago has no lease to prolong and is nobody else's: its claim is returned as well.
    """
    rows = await connection.fetch(RENEW_SQL, *_claim_columns(claims), seconds)
    kept = {(row["call_id"], row["epoch"]) for row in rows}
    return {claim for claim in claims if (claim.call_id, claim.epoch) in kept}


RELEASE_SQL = """
UPDATE outgoing_calls AS o
SET leased_by = NULL, leased_until = NULL
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS mine (org, session_id, call_id, epoch)
WHERE o.org = mine.org AND o.session_id = mine.session_id AND o.call_id = mine.call_id AND o.epoch = mine.epoch
RETURNING o.call_id
"""


async def release(connection: Connection, claims: Sequence[Claim]) -> None:
    """Give leases back, so that any worker may take the calls once they are due. Needs a dispatcher's connection."""
    await connection.fetch(RELEASE_SQL, *_claim_columns(claims))


LOCK_SESSION_SQL = """
SELECT revision
FROM sessions
WHERE org = $1 AND session_id = $2
FOR NO KEY UPDATE
"""

GIVE_BACK_SQL = """
UPDATE outgoing_calls AS o
SET leased_by = NULL, leased_until = NULL
FROM outgoing_calls AS mine
WHERE mine.org = $1 AND mine.session_id = $2 AND mine.call_id = $4 AND mine.epoch = $5
  AND o.org = $1 AND o.session_id = $2 AND o.leased_by = $3
  AND (
    o.call_id = $4
    OR o.epoch = 0 AND NOT EXISTS (
      SELECT FROM outgoing_calls AS passed
      WHERE passed.org = $1 AND passed.session_id = $2 AND passed.step_index < mine.step_index AND passed.step_index > o.step_index
    )
  )
RETURNING o.call_id
"""


async def give_back(tx: Transaction, claim: Claim, worker: str) -> None:
    """Give back whatever a worker that lost track holds of a session, so that the work goes on before the lease runs out.

    That is its claim, and the next call that its last write may have left under the same lease (epoch 0: nobody has claimed it since).
    Once somebody newer owns the call, its last write came to nothing, and what follows is theirs, be it another task of the same worker;
    and so is what follows after the very next call.
    The session's lock comes first: a last write that is still under way is waited for, and its call is seen.
    """
    await tx.connection.fetchval(LOCK_SESSION_SQL, tx.org, claim.session_id)
    await tx.connection.fetch(GIVE_BACK_SQL, tx.org, claim.session_id, worker, claim.call_id, claim.epoch)


def _claim_columns(claims: Sequence[Claim]) -> tuple[list[str], list[str], list[CallId], list[int]]:
    """Return claims as columns, in the order in which a write of many sessions locks their calls, so that neither waits for the other."""
    claims = sorted(claims, key=lambda claim: (claim.org, claim.session_id))
    return (
        [claim.org for claim in claims],
        [claim.session_id for claim in claims],
        [claim.call_id for claim in claims],
        [claim.epoch for claim in claims],
    )
