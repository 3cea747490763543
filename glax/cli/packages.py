"""Check for packages that a subcommand needs and `import glax` does not."""

import importlib.util

from glax.cli.errors import UsageError

DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}  # of packages whose distribution has another name


def require(packages: tuple[str, ...]):
    """Raise UsageError if one of the packages is not installed. The remedy installs their own distributions."""
    missing = [DISTRIBUTIONS.get(name, name) for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
