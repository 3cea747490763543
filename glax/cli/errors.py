"""What a user did wrong."""


class UsageError(Exception):
    """One line for the user, who sees it instead of a traceback; the exit code is 2."""
