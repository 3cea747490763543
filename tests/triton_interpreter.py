"""Run Triton kernels on the CPU: replace jax_triton.triton_call by Triton's interpreter on NumPy arrays.

Every input lies between guards of NaN (integers: the largest), so that a read out of bounds changes the result. Outputs are
initialised to NaN, so that an element that is never stored is noticed. The interpreter holds bfloat16 as bits; here it is
computed in float32 and rounded to nearest, as on the hardware. float32 is rounded to nearest in float8_e4m3fn too, where the
interpreter loses the carry into the exponent. Import this module before Triton.

This checks arithmetic, indices, masks and the grid. Programs run one after the other, so races are not found.
"""

import functools
import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

GUARD = 256  # elements on either side of every array


class Memory:
    """An array as the interpreter wants its arguments: with the few methods of a tensor that it calls."""

    def __init__(self, x: np.ndarray):
        self.whole = np.empty(x.size + 2 * GUARD, x.dtype)
        poison(self.whole)
        self.x = self.whole[GUARD : GUARD + x.size].reshape(x.shape)
        self.x[...] = x
        self.shape, self.dtype = x.shape, x.dtype

    def data_ptr(self):
        return self.x.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other is self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.x.shape

    def stride(self):
        return tuple(s // self.x.itemsize for s in self.x.strides)

    def written_only_inside(self) -> bool:
        guards = np.concatenate([self.whole[:GUARD], self.whole[GUARD + self.x.size :]])
        clean = np.empty_like(guards)
        poison(clean)
        return guards.tobytes() == clean.tobytes()


def poison(x: np.ndarray):
    if x.dtype.kind in "iu":
        x.fill(np.iinfo(x.dtype).max)
    else:
        x.view(np.uint8).fill(0xFF)


def triton_call(
    *operands,
    kernel,
    grid,
    num_warps,
    num_stages,
    input_output_aliases=None,
    out_type=None,
    out_shape=None,
    **constants,
):
    """Run a kernel in the interpreter, with the interface of jax_triton.triton_call."""
    outputs = out_type if out_type is not None else out_shape
    aliases = {output: operand for operand, output in (input_output_aliases or {}).items()}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    passed_again = out_type is None  # jax-triton 0.3

    def host(*arrays):
        given = [Memory(np.asarray(x)) for x in arrays]
        made = []
        for i, shape in enumerate(shapes):
            if i in aliases:
                made.append(given[aliases[i]])
            else:
                x = np.empty(shape.shape, shape.dtype)
                poison(x.reshape(-1))
                made.append(Memory(x))
        extra = [x for i, x in enumerate(made) if passed_again or i not in aliases]
        with np.errstate(all="ignore"):  # hardware does not warn; a fast form that overflows is recomputed
            kernel[grid](*given, *extra, **constants)
        assert all(x.written_only_inside() for x in given + made), f"{kernel} wrote out of bounds"
        return [x.x for x in made]

    return jax.pure_callback(host, shapes, *operands, vmap_method="sequential")


def install():
    """Replace jax_triton.triton_call in this process."""
    import jax_triton

    jax_triton.triton_call = triton_call
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = functools.partial(patch_language, interpreter._patch_lang)
    repair_bfloat16()
    repair_float8()


def patch_language(patch, function):
    """The interpreter's own, which patches all again at each call of a function within a kernel."""
    return patch(function) if any(tl.core.is_builtin(where.load) for where in languages_of(function)) else None


@functools.cache
def languages_of(function) -> list:
    """What a function's module calls Triton's language by."""
    return [x for x in function.__globals__.values() if x is tl or x is tl.core]


def patch_builtins(where, *rest):
    """The interpreter's own, which looks through all of triton.language at each call of a function: a third of the time."""
    for name in builtins_of(where):
        if tl.core.is_builtin(member := getattr(where, name)):
            interpreter._patch_attr(where, name, member, *rest)


@functools.cache
def builtins_of(where) -> list[str]:
    """Return their names. The first call must come before any of them is patched."""
    return [name for name, member in inspect.getmembers(where) if tl.core.is_builtin(member)]


# ---- bfloat16 --------------------------------------------------------------------------------------------------------

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
ARITHMETIC = ["fadd", "fsub", "fmul", "fdiv", "frem", "fma", "fneg", "fabs"]
ARITHMETIC += ["minimumf", "maximumf", "minnumf", "maxnumf"]


def is_bfloat16(x) -> bool:
    return x.dtype.scalar == tl.bfloat16


def widened(x):
    return Handle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32) if is_bfloat16(x) else x


def rounded(x):
    return Handle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


def cut_off(x):
    """As tensor cores take float32 for TF32."""
    bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
    return Handle(bits.view(np.float32), tl.float32) if x.dtype.scalar == tl.float32 else x


def repair_bfloat16():
    def in_float32(original, rounds):
        def method(self, *operands):
            if not any(map(is_bfloat16, operands)):
                return original(self, *operands)
            result = original(self, *map(widened, operands))
            return rounded(result) if rounds else result

        return method

    for name in dir(Builder):
        arithmetic = name.removeprefix("create_") in ARITHMETIC
        if arithmetic or name.startswith("create_fcmp"):
            setattr(Builder, name, in_float32(getattr(Builder, name), arithmetic))
    dot, cast = Builder.create_dot, Builder.cast_impl

    def create_dot(self, a, b, d, precision, *rest):
        a, b = (cut_off(x) if precision.name == "TF32" else x for x in (widened(a), widened(b)))
        return dot(self, a, b, d, precision, *rest)

    Builder.create_dot = create_dot

    def cast_impl(self, x, dtype):
        narrow = dtype.scalar == tl.bfloat16 and x.dtype.scalar in (tl.float32, tl.float16, tl.float64)
        return rounded(x) if narrow else cast(self, x, dtype)

    Builder.cast_impl = cast_impl


def repair_float8():
    convert = Builder.create_fp_to_fp

    def create_fp_to_fp(self, x, dtype, rounding):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.float8e4nv):
            return convert(self, x, dtype, rounding)
        largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        nearest = np.clip(x.data, -largest, largest).astype(ml_dtypes.float8_e4m3fn)
        return Handle(nearest.view(np.uint8), tl.float8e4nv)

    Builder.create_fp_to_fp = create_fp_to_fp
