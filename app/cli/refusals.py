"""What a command may refuse with. Must not print: `main` does."""


class SetupError(Exception):
    """Something outside has to be set up differently; the text says what, in one line."""
