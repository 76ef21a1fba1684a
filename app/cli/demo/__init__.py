"""The demo: a refund that fails half way, twice, before the reader's eyes. Must not use the service but by its command and its API.

The story: `story`, then `first_half`, then `second_half` with its chapters `changed_payload`, `past_the_pivot`, `called_person`, `way_out`.
Who plays: `agent` with its `toolbox`, `person`, the outside `systems` behind `listeners`, and the service as a process, `server`. Whether
it was as promised: `verdict`, `second_verdict`. How it looks: `screen`, `table`, `escalation_page`.
"""

from app.cli.demo.story import run_demo

__all__ = ["run_demo"]
