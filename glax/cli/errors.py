"""Define the error for a mistake of the user, and check for packages that a command needs and `import glax` does not."""

import importlib.util

DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}  # of packages whose distribution has another name


class UsageError(Exception):
    """Report a mistake of the user. Its message is one line, printed instead of a traceback, and the exit code is 2."""


def reason(error: Exception) -> str:
    """Return the message of an error; for an OSError, the system's message and the file."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def require(packages: tuple[str, ...]):
    """Raise UsageError if one of the packages is not installed. The remedy installs their own distributions."""
    missing = [DISTRIBUTIONS.get(name, name) for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
