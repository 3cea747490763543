"""The style rules that a syntax tree and a list of words can show, held in the package, the tests and the benchmarks."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.tooling.test_words import retired

pytestmark = pytest.mark.core  # the same with every JAX
ROOT = pathlib.Path(__file__).parents[2]
SEARCHED = ("glax", "glax_cli", "tests", "benchmarks")
SUFFIXES = (".py", ".h", ".cc", ".md", ".txt")
NO_PROSE = ("tests/tooling/test_words.py",)  # which quotes two of the words
KERNELS = "glax/_src/kernels/"
DEVICE_KERNELS = tuple(f"{KERNELS}{platform}/" for platform in ("triton", "pallas_gpu", "pallas_tpu"))
PRIVATE = ("glax/_src/", "glax/cli/", "glax_cli/", "tests/", "benchmarks/")

KERNEL_FILE_LINES = 900  # a kernel is one file; other files may have as many lines as are read together
FUNCTION_LINES = 120
PARAMETERS = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*suffixes: str) -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every file of the package, the tests and the benchmarks."""
    for folder in SEARCHED:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in suffixes and not name.startswith("benchmarks/out/"):
                yield name, path.read_text()


def public_names() -> set[str]:
    """Names that a public module imports from the private package."""
    found = set()
    for name, text in files(".py"):
        if name.startswith("glax/") and not name.startswith(PRIVATE):
            imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            found |= {alias.name for node in imports for alias in node.names}
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, definition) of every function, those inside of classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def num_parameters(function: Function) -> int:
    a = function.args
    return len([*a.posonlyargs, *a.args, *a.kwonlyargs]) + (a.vararg is not None) + (a.kwarg is not None)


def function_violations(path: str, tree: ast.AST, public: set[str]) -> Iterator[str]:
    for name, function in functions(tree):
        is_public = function.name in public or not path.startswith(PRIVATE)
        if function.end_lineno - function.lineno + 1 > FUNCTION_LINES:
            yield f"function-lines {path}::{name}"
        if num_parameters(function) > PARAMETERS and not (is_public or path.startswith(DEVICE_KERNELS)):
            yield f"parameters {path}::{name}"


def is_simple_namespace(node: ast.AST) -> bool:
    names = (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
    return "SimpleNamespace" in names


def is_computed_attribute(node: ast.AST) -> bool:
    """`getattr(m, name + "_g")` and its like: the attribute's name is put together where it is read or set."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return False
    return node.func.id in ("getattr", "setattr", "hasattr") and isinstance(
        node.args[1], ast.JoinedStr | ast.BinOp | ast.Call
    )


def is_named_lambda(node: ast.AST) -> bool:
    return isinstance(getattr(node, "value", None), ast.Lambda) and any(
        isinstance(target, ast.Name) for target in getattr(node, "targets", [getattr(node, "target", None)])
    )


def holds_named_lambda(node: ast.AST) -> bool:
    """A lambda is assigned to a name; the default of a field of a dataclass is none."""
    return any(
        is_named_lambda(child)
        for child in ast.iter_child_nodes(node)
        if not (isinstance(node, ast.ClassDef) and isinstance(child, ast.AnnAssign))
    )


def is_nested_conditional(node: ast.AST) -> bool:
    return isinstance(node, ast.IfExp) and sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1


RULES = {
    "simple-namespace": is_simple_namespace,
    "computed-attribute": is_computed_attribute,
    "named-lambda": holds_named_lambda,
    "nested-conditional": is_nested_conditional,
}


def violations() -> set[str]:
    """`rule path` or `rule path::function` of all that does not fulfil a rule."""
    found = set()
    public = public_names()
    for path, text in files(".py"):
        tree = ast.parse(text)
        found |= set(function_violations(path, tree, public))
        nodes = list(ast.walk(tree))
        found |= {f"{rule} {path}" for rule, breaks in RULES.items() if any(map(breaks, nodes))}
        if path.startswith(KERNELS) and len(text.splitlines()) > KERNEL_FILE_LINES:
            found.add(f"file-lines {path}")
    words = re.compile(rf"(?<!\bast\.)\b({'|'.join(map(re.escape, retired()))})\b", flags=re.IGNORECASE)
    found |= {f"retired-words {path}" for path, text in files(*SUFFIXES) if words.search(text) and path not in NO_PROSE}
    return found


def test_nothing_breaks_a_rule():
    broken = sorted(violations())
    assert not broken, "mend these:\n" + "\n".join(broken)


@pytest.mark.parametrize(
    "rule, code",
    [
        ("simple-namespace", "m = types.SimpleNamespace(a=1)"),
        ("simple-namespace", "from types import SimpleNamespace"),
        ("computed-attribute", 'x = getattr(m, name + "_g")'),
        ("computed-attribute", 'setattr(m, f"{name}_g", 1)'),
        ("named-lambda", "f = lambda x: x"),
        ("named-lambda", "f: Callable = lambda x: x"),
        ("named-lambda", "g((f := lambda x: x))"),
        ("nested-conditional", "a = 1 if b else 2 if c else 3"),
    ],
)
def test_a_violation_is_found(rule, code):
    assert any(map(RULES[rule], ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    "code", ["class A:\n    f: Callable = lambda x: x", "t[0] = lambda x: x", "f(a, key=lambda x: x)"]
)
def test_a_lambda_without_a_name_is_none(code):
    assert not any(map(holds_named_lambda, ast.walk(ast.parse(code))))


def test_a_long_function_and_many_parameters_are_found():
    parameters = ", ".join(f"x{i}" for i in range(PARAMETERS + 1))
    tree = ast.parse(f"class A:\n    def f({parameters}):\n" + "        pass\n" * FUNCTION_LINES)
    found = set(function_violations("glax/_src/a.py", tree, set()))
    assert found == {"function-lines glax/_src/a.py::A.f", "parameters glax/_src/a.py::A.f"}
    found = set(function_violations(f"{DEVICE_KERNELS[0]}a.py", tree, set()))
    assert found == {f"function-lines {DEVICE_KERNELS[0]}a.py::A.f"}
