"""${message}. Must not be edited once released."""

from migrations.sql import run

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

# The oldest code that still runs on what this makes: its own where something is taken away (docs/decisions/0023).
UP_SQL = """
UPDATE schema_support SET oldest_revision = ${repr(down_revision)};
"""

# And what the revision before said.
DOWN_SQL = """
UPDATE schema_support SET oldest_revision = ...;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
