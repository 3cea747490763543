"""Who may import whom; what `import glax` costs and needs."""

import ast
import functools
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.core
ROOT = pathlib.Path(__file__).parents[2] / "glax"

# From the ground up: a module may import those of its own line and of lines above it.
LAYERS = [
    ["glax._version"],
    ["glax._src.core"],
    ["glax._src.kernels.common"],
    ["glax._src.kernels.pallas_gpu.plan"],
    ["glax._src.kernels.pallas_gpu.device"],
    ["glax._src.kernels.pallas_gpu.chunks"],
    ["glax._src.kernels.pallas_gpu.scan", "glax._src.kernels.pallas_gpu.gradient"],
    [
        "glax._src.kernels.xla",
        "glax._src.kernels.cpu",
        "glax._src.kernels.triton",
        "glax._src.kernels.cuda",
        "glax._src.kernels.pallas_gpu",
        "glax._src.kernels.pallas_tpu",
    ],
    ["glax._src.kernels"],
    ["glax._src.tuning"],
    ["glax._src.solve"],
    ["glax._src.api.recurrent"],
    ["glax._src.serving", "glax._src.api", "glax._src.parallel"],
    ["glax._src"],
    ["glax.testing", "glax.configs"],
    ["glax"],
    ["glax.compat", "glax.nn", "glax.parallel", "glax.serving"],
    ["glax.models"],
    ["glax.server"],
    ["glax_cli"],
    ["glax.cli"],
    ["glax.__main__"],
]


@functools.cache
def modules() -> tuple[tuple[str, pathlib.Path], ...]:
    found = []
    for path in sorted([*ROOT.rglob("*.py"), *(ROOT.parent / "glax_cli").rglob("*.py")]):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return tuple(found)


def layer(module: str) -> int:
    """The line of LAYERS with the longest name that module is, or lies in."""
    fits = [
        (len(name), i)
        for i, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    fits = [fit for fit in fits if module == "glax" or LAYERS[fit[1]] != ["glax"]]
    assert fits, f"{module} stands in no line of LAYERS"
    return max(fits)[1]


@functools.cache
def imports(path: pathlib.Path, types: bool = True) -> set[str]:
    """Return the modules that a file imports. types: also those that it imports for type checkers alone."""
    known = {name for name, _ in modules()}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = set() if types else {each for guard in guards for each in ast.walk(guard)}
    found = set()
    for node in nodes:
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in known else node.module for a in node.names
            }
    return found


def test_imports_go_one_way():
    for module, path in modules():
        for name in imports(path):
            if (module, name) == ("glax_cli", "glax.cli"):
                continue  # inside of the function that runs a command
            if name.split(".")[0] in ("glax", "glax_cli"):
                assert layer(name) <= layer(module), f"{module} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions count, those for type checkers alone do not."""
    own = dict(modules())
    graph = {module: {name for name in imports(path, types=False) if name in own} for module, path in own.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_compat_imports_the_public_api_alone():
    for module, path in modules():
        if module.startswith("glax.compat"):
            private = {name for name in imports(path) if name.startswith("glax._")}
            assert not private, f"{module} imports {private}"


def test_platforms_do_not_import_each_other():
    for module, path in modules():
        if module.startswith("glax._src.kernels."):
            platform = module.split(".")[3]
            others = {
                n
                for n in imports(path)
                if n.startswith("glax._src.kernels.") and n.split(".")[3] not in (platform, "common")
            }
            assert not others, f"{module} imports {others}"


def test_optional_packages_stay_in_their_folders():
    core = {"jax", "numpy", "jaxtyping", "glax", "glax_cli"} | set(sys.stdlib_module_names)
    for module, path in modules():
        outside = {name.split(".")[0] for name in imports(path)} - core
        if module == "glax._src.tuning.cache":
            outside -= {"filelock"}  # at the first use of the disk, not at import
        if module == "glax._src.core.files":
            outside -= {"platformdirs"}  # likewise
        if module == "glax._src.api.explain":
            outside -= {"rich"}  # for the progress bar of `tune`
        if module == "glax._src.kernels.triton.launch":
            outside -= {"triton", "jax_triton"}  # at the first call that runs there
        assert not outside or module.startswith(("glax.nn", "glax.models", "glax.server", "glax.cli", "glax_cli")), (
            f"{module} imports {outside}"
        )


@pytest.mark.fast
def test_import_touches_no_device_and_no_optional_package():
    code = """
import sys, jax, numpy, jaxtyping
before = set(sys.modules)
import glax
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device was initialised"
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"glax", "jax", "jaxlib", "absl"}, new  # Pallas, which JAX has, imports the last two
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_imports_no_jax():
    """Help takes less than half a second of processor time, in the best of three processes."""
    code = """
import sys, time
from glax_cli import main
for arguments in (["--help"], ["bench", "--help"], ["--version"], []):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
assert not {"jax", "numpy", "rich", "glax"} & set(sys.modules)
print(time.process_time())
"""
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(3)]
    assert min(float(run.stdout.split()[-1]) for run in runs) < 0.5


ONE_TRACE = """
import jax, jax.numpy as jnp
import glax

traces = []

def counted(f):
    def traced(*operands):
        traces.append(f.__name__)
        return f(*operands)
    return jax.jit(traced)

x = jnp.sin(jnp.arange(64 * 2 * 8.0)).reshape(1, 64, 2, 8)

def forward(x): return glax.recurrent(x, x, x, gk=-abs(x)).output
def gradient(x): return jax.grad(lambda x: glax.kda(x, x, x, -abs(x), abs(x[..., 0])).output.sum())(x)
def step(x): return glax.recurrent_step(x[:, 0], x[:, 0], x[:, 0], jnp.ones((1, 2, 8, 8)))

calls = [counted(f) for f in (forward, gradient, step)]
for f in calls:
    f(x), f(x)
jax.export.export(calls[0], platforms=["tpu"])(jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16"))
import jax.experimental.pallas.tpu, jax.experimental.pallas.mosaic_gpu
for f in calls:
    f(x)
assert traces == ["forward", "gradient", "step", "forward"], traces
"""


@pytest.mark.fast
def test_a_first_call_inside_jit_is_traced_once():
    """JAX's cache key of jit has options that Pallas adds when it is imported, so no call of glax may be the first to import
    it."""
    subprocess.run([sys.executable, "-c", ONE_TRACE], check=True)


@pytest.mark.fast
def test_import_costs_little():
    """The best of three processes computes for less than 0.25 s beyond JAX's own import, whatever else the machine does. JAX's
    objects are frozen, for a collection of them costs 0.1 s. As where glax is installed, Python has compiled it before."""
    code = "import gc, time, jax; gc.freeze(); start = time.process_time(); import glax; print(time.process_time() - start)"
    environment = os.environ | dict(PYTHONDONTWRITEBYTECODE="")
    command = [sys.executable, "-c", code]
    _, *runs = (subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(4))
    assert min(float(run.stdout) for run in runs) < 0.25
