"""Add the low-rank terms of `flax.nnx.LoRA` to the kernels they belong to."""

import jax
from flax import nnx

from glax.models.checkpoints import parameters
from glax.nn.parts import with_term


def merged_parameters(model: nnx.Module) -> dict[str, jax.Array]:
    """Return the value of each parameter by its path, with kernel + A B for the kernel that `LoRA` or `LoRALinear` adapts.

    The sum is formed in float32 and has the kernel's dtype. The model is not changed. Raises ValueError, which names the path,
    for an adapter without a kernel, and for a subclass, whose function may be another.
    """
    values = {path: param[...] for path, param in parameters(model)}
    adapters = [(".".join(map(str, path)), x) for path, x in nnx.iter_modules(model) if isinstance(x, nnx.LoRA)]
    linears = {".".join(map(str, path)): x for path, x in nnx.iter_modules(model) if isinstance(x, nnx.LoRALinear)}
    for path, adapter in sorted(adapters, key=lambda found: -found[0].count(".")):  # inner adapters first
        outer, _, last = path.rpartition(".")
        is_inside = last == "lora" and type(linears.get(outer)) is nnx.LoRALinear
        kernel = f"{outer}.kernel" if is_inside else f"{path}.base_module.kernel"
        if type(adapter) is not nnx.LoRA or kernel not in values:
            raise ValueError(
                f"{path} cannot be saved: glax adds a LoRA to the kernel of its base_module, or of its LoRALinear, and this "
                f"{type(adapter).__name__} has none. Merge it by hand before saving"
            )
        for name in ("lora_a", "lora_b"):
            values.pop(f"{path}.{name}", None)
        values[kernel] = with_term(values[kernel], adapter)
        if not is_inside:
            base = f"{path}.base_module."
            values = {f"{path}.{x[len(base) :]}" if x.startswith(base) else x: value for x, value in values.items()}
    return values
