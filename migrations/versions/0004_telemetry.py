"""Telemetry: what the dispatcher reads to tell the backlog, and the index that it is read by. Must not be edited once released."""

from migrations.sql import run

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UP_SQL = """
CREATE INDEX sessions_open ON sessions (state, created_at, failed_at, halted_at)
  WHERE state IN ('active', 'awaiting_approval', 'failed', 'compensating', 'halted');
GRANT SELECT (created_at, failed_at, halted_at) ON sessions TO countermand_dispatcher;
"""

DOWN_SQL = """
REVOKE SELECT (created_at, failed_at, halted_at) ON sessions FROM countermand_dispatcher;
DROP INDEX sessions_open;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
