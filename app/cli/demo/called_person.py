"""Chapter C: what the person who is called gets to read. Must not order anything."""

from app.cli.demo.escalation_page import page
from app.cli.demo.past_the_pivot import Halted
from app.cli.demo.person import move_about
from app.cli.demo.promises import hold_to
from app.cli.demo.screen import say_heading, say_lines
from app.cli.demo.second_verdict import Escalated, judge_escalated
from app.cli.demo.stage import Cast, subject_of
from app.cli.demo.systems import JsonObject
from app.domain.model import Role


def play(cast: Cast, halted: Halted) -> JsonObject:
    """Print the escalation as an operator would read it, and return it.

    Raises:
        DemoFailed: something is not as promised.
    """
    session_id = halted.run.session_id
    say_heading(f"C. What the operator reads: GET /v1/sessions/{session_id}/escalation")
    escalation = cast.person.escalation(session_id)
    say_lines(page(escalation, whole=move_about(escalation, "unwind")))
    hold_to(
        judge_escalated(
            Escalated(
                done=halted.run.done,
                reply=halted.reply,
                error=halted.error,
                announcement=cast.person.announcement(session_id),
                escalation=escalation,
                commands=[cast.person.command(move, "because") for move in escalation["moves"]],
                approver=subject_of(Role.OPERATOR),
            )
        )
    )
    return escalation
