"""Countermand: an HTTP saga orchestrator for AI agents' tool side effects. Holds no code: see `main` for the service."""
