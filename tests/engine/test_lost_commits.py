"""A worker whose commit loses its connection gives back what it holds: nothing waits for the lease. Must not kill the worker itself."""

from dataclasses import dataclass

import pytest

from app.domain.model import EntryKind
from tests.conftest import StartService
from tests.factories import do_step, open_service, undo_at
from tests.fakes import FakeEndpoint
from tests.faults.gates import Place, shut_gate
from tests.faults.proxy import open_proxy

LEASE_SECONDS = 60.0
QUICKLY_SECONDS = 15  # beside the lease, and generous beside what it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The entry whose commit is held; whether that commit stands though nobody hears of it; path and attempt of the undos that arrive."""

    kind: EntryKind
    does_stand: bool
    expected: list[tuple[str, str]]


LOSSES = [
    Loss(kind=EntryKind.COMPENSATING, does_stand=False, expected=[("/2", "1"), ("/1", "1")]),
    Loss(kind=EntryKind.COMPENSATING, does_stand=True, expected=[("/2", "2"), ("/1", "1")]),
    Loss(kind=EntryKind.COMPENSATED, does_stand=False, expected=[("/2", "1"), ("/1", "1")]),
    Loss(kind=EntryKind.COMPENSATED, does_stand=True, expected=[("/2", "1"), ("/1", "2")]),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{'stands' if loss.does_stand else 'undone'}")
async def test_unwind_goes_on_long_before_the_lease_ends_when_a_commit_loses_its_connection(
    services: StartService, database_url: str, endpoint: FakeEndpoint, loss: Loss
) -> None:
    """Before an attempt and after it, undone or committed unheard: each undo arrives once, within seconds of a lease of a minute."""
    api = await services(has_orchestrator=False)
    for step in (1, 2):
        await do_step(api.agent, "s", step, endpoint.url(f"/{step}"))
    async with (
        open_proxy(database_url) as proxy,
        open_service(proxy.url, has_api=False, lease_seconds=LEASE_SECONDS),
        shut_gate(database_url, "s", loss.kind, 2, Place.COMMIT) as gate,
    ):
        (await api.agent.fail("s")).raise_for_status()
        await gate.is_reached()
        if loss.does_stand:
            proxy.leave()
        else:
            await gate.end_who_waits()
        await gate.open()
        answer = await api.agent.fail("s", wait_s=QUICKLY_SECONDS)
    assert answer.json()["state"] == "compensated"
    assert [(request.path, request.header("Countermand-Attempt")) for request in endpoint.received] == loss.expected


async def test_unwind_goes_on_long_before_the_lease_ends_when_the_claimed_entry_was_settled_meanwhile(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """The claimed call's entry was skipped by a late report, so the worker moved on to the next one, in a commit that nobody hears of."""
    api = await services(has_orchestrator=False)
    await do_step(api.agent, "s", 1, endpoint.url("/1"))
    (await api.agent.intercept("s", step_index=2, compensation=undo_at(endpoint.url("/2")))).raise_for_status()
    (await api.agent.fail("s")).raise_for_status()
    assert (await api.agent.fail_effect("s", 2, "not_applied")).status_code == 409
    async with (
        open_proxy(database_url) as proxy,
        shut_gate(database_url, "s", EntryKind.COMPENSATING, 1, Place.COMMIT) as gate,
        open_service(proxy.url, has_api=False, lease_seconds=LEASE_SECONDS),
    ):
        await gate.is_reached()
        proxy.leave()
        await gate.open()
        answer = await api.agent.fail("s", wait_s=QUICKLY_SECONDS)
    assert answer.json()["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/1"]
