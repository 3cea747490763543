"""Define the error for a mistake of the user."""


class UsageError(Exception):
    """A mistake of the user. Its message is one line, printed instead of a traceback, and the exit code is 2."""
