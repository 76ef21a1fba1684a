"""The schema's history as plain SQL under Alembic. Must not import `app`: a migration stays true when the code moves on."""
