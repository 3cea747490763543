"""Check for packages that a subcommand needs and `import glax` does not."""

import importlib.util

from glax.cli.errors import UsageError


def require(packages: tuple[str, ...], extra: str):
    """Raise UsageError if one of the packages is not installed. extra: the extra of glax that installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'{", ".join(missing)} not installed: pip install "glax[{extra}]"')
