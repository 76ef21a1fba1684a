"""The demo: a refund that fails half way, undone before the reader's eyes. Must not use the service but by its command and its API."""

from app.cli.demo.story import run_demo

__all__ = ["run_demo"]
