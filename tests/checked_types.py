"""Shape annotations of some packages, checked at every call of a test: jaxtyping's import hook with beartype.

CHECKED names the packages. Not among them: what users call, whose own errors are tested; code that Triton and CUDA compile; and
`Recurrence` with its parts, which also holds shapes and PartitionSpecs in the place of arrays.
"""

import beartype
import jax.export
import jaxtyping
from beartype.roar import BeartypeDecorHintPep673Exception

CHECKED = (
    "glax._src.kernels.xla",
    "glax._src.kernels.common",
    "glax._src.parallel.boundary",
    "glax._src.parallel.exchange",
)
# A size may be a symbol of an exported program.
SYMBOL = type(jax.export.symbolic_shape("n")[0])
SIZES = beartype.BeartypeConf(hint_overrides=beartype.FrozenDict({int: int | SYMBOL}))


def checked(f):
    """f with beartype's checks of its annotations.

    A method that returns Self stays as it is, for beartype refuses it alone. So does what makes a Config, which checks itself.
    """
    if "Config.__init__" in f.__qualname__:
        return f
    try:
        return beartype.beartype(conf=SIZES)(f)
    except BeartypeDecorHintPep673Exception:
        return f


def check_types():
    jaxtyping.install_import_hook(CHECKED, "tests.checked_types.checked")
