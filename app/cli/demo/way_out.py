"""Chapter D: the operator orders the unwind, mends what stops it, and ends it. Must not order but by the escalation's own commands."""

import time

from app.cli.demo import table
from app.cli.demo.agent import Done
from app.cli.demo.api import UNWIND_SECONDS
from app.cli.demo.past_the_pivot import Halted
from app.cli.demo.person import Person, move_about
from app.cli.demo.promises import hold_to
from app.cli.demo.reply import look
from app.cli.demo.screen import say, say_heading, say_lines, say_turn
from app.cli.demo.second_verdict import Unwound, judge_unwound
from app.cli.demo.stage import Cast, Stage
from app.cli.demo.systems import REVERSALS_PATH, TICKET, Answer, JsonObject

IS_LOCKED = Answer(status=423, members={"error": f"ticket {TICKET} is locked: it is being merged"})
BY_HAND_KEY = "by-hand-of-finance"


def play(stage: Stage, cast: Cast, halted: Halted, escalation: JsonObject) -> None:
    """Play it and print it.

    Raises:
        DemoFailed: something is not as promised.
    """
    say_heading("D. The operator decides: undo it all, although the reply stands (by the escalation's own commands)")
    started = time.monotonic()
    person, done = cast.person, halted.run.done
    credit, ticket, _note = done
    first = _order_the_unwind(stage, person, escalation)
    _undo_by_hand(stage, cast, halted, credit)
    last = _mend_and_retry(stage, person, halted, ticket)
    seen = look(stage, cast, halted.run, last)
    say_lines(table.undone_lines(done, seen.undos, started))
    say("")
    say_lines(table.world_lines({"before": seen.before, "when it halted": halted.then, "now": seen.now}))
    hold_to(judge_unwound(Unwound(seen=seen, by_hand=credit, refused=ticket, halted=first, then=halted.then)))


def _order_the_unwind(stage: Stage, person: Person, escalation: JsonObject) -> JsonObject:
    """Order it while the ticket is locked, and return the session that halts there."""
    stage.world.tickets.refusal = IS_LOCKED
    reason = "refunded before, under ticket 9088"
    session = person.order(move_about(escalation, "unwind"), reason, wait_seconds=UNWIND_SECONDS)
    say_turn("operator", f"orders the unwind: {reason}")
    refused = next((entry for entry in session["undo_stack"] if entry["state"] == "failed"), None)
    found = "" if refused is None else f" at step {refused['step_index']}: {refused['last_error']}"
    say_turn("service", f"is {session['state']} ({session['halt_reason']}){found}")
    return session


def _undo_by_hand(stage: Stage, cast: Cast, halted: Halted, credit: Done) -> None:
    """Reverse the credit in the ledger itself, and take its undo out of the unwind."""
    person, session_id = cast.person, halted.run.session_id
    escalation = person.escalation(session_id)
    step = next(each for each in escalation["steps"] if each["step_index"] == credit.step_index)
    person.do_by_hand(cast.http, stage.at.ledger + REVERSALS_PATH, step["result"], BY_HAND_KEY)
    say_turn("operator", f"has finance reverse {step['result']['credit_id']} in the ledger itself")
    move = move_about(escalation, "skip", credit.step_index, by_hand=True)
    person.order(move, "reversed by finance")
    say_turn("operator", f"skips it: {move['title']}")


def _mend_and_retry(stage: Stage, person: Person, halted: Halted, ticket: Done) -> JsonObject:
    """Have the ticket unlocked and its undo tried again, and return the session at its end."""
    stage.world.tickets.refusal = None
    move = move_about(person.escalation(halted.run.session_id), "retry", ticket.step_index)
    session = person.order(move, "the ticket is unlocked", wait_seconds=UNWIND_SECONDS)
    say_turn("operator", f"has the ticket unlocked, and retries: {move['title']}")
    clean = "clean" if session["clean"] else "not clean: a person had a hand in it, and the reply stands"
    say_turn("service", f"the session is {session['state']}, {clean}")
    return session
