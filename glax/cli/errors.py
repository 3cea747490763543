"""Define the error for a mistake of the user."""


class UsageError(Exception):
    """A mistake of the user. Its message is one line, printed instead of a traceback, and the exit code is 2."""


def reason(error: Exception) -> str:
    """Return the message of an error; for an OSError the system's words and the file."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
