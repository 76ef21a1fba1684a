"""What happens: verbs and the orchestrator, a shell of IO around `domain`. Must not contain SQL or know our own API."""
