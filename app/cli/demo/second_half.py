"""The second half: approval, the pivot, and a person who is called, chapter by chapter. Must not play the chapters: see their files."""

from app.cli.demo import called_person, changed_payload, past_the_pivot, way_out
from app.cli.demo.screen import say
from app.cli.demo.stage import Cast, Stage


def play(stage: Stage, cast: Cast) -> None:
    """Play the four chapters and print them.

    Raises:
        DemoFailed: something is not as promised; the chapters after it are not played.
    """
    say("")
    say("The mail service is back, and with it the step that cannot be undone: a reply to the customer.")
    stage.world.mail.refusal = None
    changed_payload.play(stage, cast)
    halted = past_the_pivot.play(stage, cast)
    escalation = called_person.play(cast, halted)
    way_out.play(stage, cast, halted, escalation)
