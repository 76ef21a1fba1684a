"""How the demo gives up. Must not decide when."""


class DemoFailed(Exception):
    """Something is not as it has to be; the text is one sentence for the person at the terminal."""
