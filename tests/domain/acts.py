"""What a test lets happen in a world: an agent's calls, people's answers, a worker's attempts. Must not judge what comes of it."""

from dataclasses import dataclass

from app.domain import actions, approval, intercept, outcomes, unwinding
from app.domain.approval import Approve, Released, Resume
from app.domain.intercept import AwaitApproval, Execute
from app.domain.model import CallKind, Compensation, OutgoingCall, Reversibility, SessionState, StepIndex
from app.domain.outcomes import MOVABLE_OUTCOMES, FailReport
from app.domain.retry import Attempt
from app.domain.sending import Move
from app.domain.tools import Definition, Tool
from tests.domain.world import ORCHESTRATOR, RULES, WitnessedDraft, World, command, new_compensation, seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Inline:
    """A call of a tool that nobody registered."""

    reversibility: Reversibility
    compensation: Compensation | None = None


UNDOABLE = Inline(reversibility=Reversibility.COMPENSATABLE, compensation=new_compensation())
READ = Inline(reversibility=Reversibility.READ_ONLY)
IRREVERSIBLE = Inline(reversibility=Reversibility.IRREVERSIBLE)


def keep(world: World, draft: WitnessedDraft) -> None:
    """Write a decision, if there is something to write."""
    if not draft.is_empty:
        world.apply(draft)


def ask(world: World, call: Inline | Definition, payload: bytes = b'{"amount":2500}') -> bool:
    """Intercept one more call; False where it is refused."""
    step = StepIndex(world.session.last_step + 1)
    is_inline = isinstance(call, Inline)
    asked = command(
        step_index=step,
        payload=payload,
        compensation=call.compensation if is_inline else None,
        reversibility=call.reversibility if is_inline else None,
    )
    tool = None if isinstance(call, Inline) else Tool(name=asked.tool, version=1, definition=call)
    unsettled = [
        effect
        for effect in world.effects.values()
        if effect.state in MOVABLE_OUTCOMES and effect.reversibility is not Reversibility.READ_ONLY
    ]
    draft = world.draft()
    decision = intercept.decide(draft, asked, seen(unsettled=unsettled, tool=tool), RULES)
    if not isinstance(decision, Execute | AwaitApproval):
        assert draft.is_empty
        return False
    if isinstance(call, Definition):
        world.definitions[step] = call
    keep(world, draft)
    return True


def commit(world: World, step: int, result: bytes = b"{}") -> object:
    """Report that a call happened."""
    draft = world.draft()
    answer = outcomes.commit(draft, world.reported(step), result)
    keep(world, draft)
    return answer


def fail_effect(world: World, step: int, report: FailReport) -> object:
    """Report that a call failed."""
    draft = world.draft()
    answer = outcomes.fail_effect(draft, world.reported(step), report, list(world.effects.values()))
    keep(world, draft)
    return answer


def approve(world: World, step: int) -> object:
    """Let ada say yes."""
    draft = world.draft("operator:ada")
    decided = approval.approve(draft, world.reported(step), world.known(), Approve(by="ada"))
    keep(world, draft)
    return decided


def release(world: World, step: int) -> None:
    """Let ada say yes, and the agent present the bytes."""
    approve(world, step)
    draft = world.draft()
    presented = Resume(by="robot-1", payload=world.effects[step].payload, request_key=None)
    assert isinstance(approval.release(draft, world.parked(step), presented), Released)
    keep(world, draft)


def run(world: World, *calls: Inline | Definition, result: bytes = b"{}") -> World:
    """Do one call after the other: those that nobody has to approve are committed, the others released."""
    for call in calls:
        assert ask(world, call)
        step = world.session.last_step
        if world.session.state is SessionState.AWAITING_APPROVAL:
            release(world, step)
        else:
            commit(world, step, result)
    return world


def fail_run(world: World) -> None:
    """Say that the run failed."""
    draft = world.draft()
    assert outcomes.fail_session(draft, "the run failed", world.known()) is None
    keep(world, draft)


def due_at_step(world: World, step: int) -> OutgoingCall:
    """Return the call of a step that is due, which must be there."""
    (call,) = (call for call in world.due_calls() if call.step_index == step)
    return call


def begin(world: World, call: OutgoingCall) -> Move:
    """Let a worker look at a call that is due, once it is."""
    call = world.calls[call.call_id]
    assert call.due_at is not None
    world.now = max(world.now, call.due_at)
    draft = world.draft(ORCHESTRATOR)
    is_undo = call.kind is CallKind.UNDO
    move = unwinding.begin(draft, world.undoing(call)) if is_undo else actions.begin(draft, world.acting(call))
    keep(world, draft)
    return move


def answer(world: World, call: OutgoingCall, attempt: Attempt, unit: float = 0.5, *, may_go_on: bool = True) -> Move:
    """Record what an attempt of a call came to."""
    call, draft = world.calls[call.call_id], world.draft(ORCHESTRATOR)
    if call.kind is CallKind.UNDO:
        move = unwinding.record(draft, world.undoing(call, may_go_on=may_go_on), attempt, unit)
    else:
        move = actions.record(draft, world.acting(call), attempt, unit)
    keep(world, draft)
    return move


def send(world: World, step: int, attempt: Attempt, *, may_go_on: bool = True) -> Move:
    """Let a worker send the call of a step that is due, and record what came of it."""
    call = due_at_step(world, step)
    begin(world, call)
    return answer(world, call, attempt, may_go_on=may_go_on)
