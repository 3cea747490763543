"""Check glax's delta rule against the naive references of flash-linear-attention, on the shapes of its own tests.

    python benchmarks/fla_naive.py --write FILE    in an environment with torch and fla: inputs and results
    python benchmarks/fla_naive.py FILE            in an environment with glax: runs each platform on these inputs

The references are delta_rule, gated_delta_rule, kda and gated_delta_product, in float32, forward, final state and gradients. A
product of n updates a token is a gated delta rule over n T rows: the gate stands at a token's first row, and the output is read
at its last. The exit code is 1 if anything differs by more than 2e-5 of its norm, or 1e-4 for gradients.
"""

import argparse
import sys

import numpy as np

SHAPES = {  # B, T, H, value heads, D, gates divided by, updates a token
    "delta_rule": [(1, 63, 1, 1, 60, 1, 1), (2, 100, 4, 4, 60, 1, 1), (2, 256, 2, 2, 128, 1, 1)],
    "gated_delta_rule": [
        (1, 63, 1, 1, 64, 1, 1),
        (2, 200, 3, 3, 60, 0.1, 1),
        (2, 256, 3, 3, 64, 1, 1),
        (2, 128, 4, 4, 64, 10, 1),
    ],
    "kda": [(1, 63, 1, 1, 64, 1, 1), (2, 100, 3, 3, 60, 0.1, 1), (2, 200, 4, 4, 128, 10, 1), (2, 96, 2, 4, 64, 1, 1)],
    "gated_delta_product": [(1, 63, 1, 1, 60, 1, 2), (2, 100, 2, 2, 60, 0.1, 3), (2, 64, 2, 2, 128, 1, 2)],
}


def inputs(name: str, shape, seed: int) -> dict[str, np.ndarray]:
    """Normal values, keys and queries of norm 1, beta of a sigmoid, log-sigmoid gates, an initial state, and cotangents."""
    B, T, H, HV, D, normalizer, n = shape
    rng = np.random.default_rng(seed)

    def normal(*size):
        return rng.standard_normal(size, dtype=np.float32)

    arrays = dict(q=normal(B, T, H, D), k=normal(B, T * n, H, D), v=normal(B, T * n, HV, D))
    for x in ("q", "k"):
        arrays[x] /= np.linalg.norm(arrays[x], axis=-1, keepdims=True)
    arrays["beta"] = 1 / (1 + np.exp(-normal(B, T * n, HV)))
    gate = dict(gated_delta_rule=(B, T, HV), kda=(B, T, HV, D), gated_delta_product=(B, T, HV)).get(name)
    if gate is not None:
        arrays["g"] = (-np.log1p(np.exp(-normal(*gate))) / normalizer).astype(np.float32)
    arrays["initial"] = normal(B, HV, D, D)
    return arrays | dict(d_output=normal(B, T, HV, D), d_final=normal(B, HV, D, D))


def write(path: str):
    import torch
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda

    def delta_rule(q, k, v, beta, initial, n):
        heads_first = (x.transpose(1, 2) for x in (q, k, v, beta))
        output, state = delta_rule_recurrence(*heads_first, initial_state=initial)
        return output.transpose(1, 2), state

    def gated_delta_rule(q, k, v, beta, g, initial, n):
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=initial, output_final_state=True)

    def kda(q, k, v, beta, g, initial, n):
        return naive_recurrent_kda(q, k, v, g, beta, initial_state=initial, output_final_state=True)

    def gated_delta_product(q, k, v, beta, g, initial, n):
        return naive_recurrent_gated_delta_product(
            q, k, v, g, beta, q.shape[-1] ** -0.5, initial_state=initial, output_final_state=True, num_householder=n
        )

    references = (delta_rule, gated_delta_rule, kda, gated_delta_product)
    saved = {}
    for reference in references:
        for i, shape in enumerate(SHAPES[reference.__name__]):
            arrays = inputs(reference.__name__, shape, i)
            tensors = {name: torch.tensor(x, requires_grad=not name.startswith("d_")) for name, x in arrays.items()}
            d_output, d_final = tensors.pop("d_output"), tensors.pop("d_final")
            output, state = reference(**tensors, n=shape[-1])
            ((output * d_output).sum() + (state * d_final).sum()).backward()
            key = f"{reference.__name__}/{i}"
            saved |= {f"{key}/in/{name}": x for name, x in arrays.items()}
            results = dict(output=output, final_state=state) | {f"d {name}": x.grad for name, x in tensors.items()}
            saved |= {f"{key}/out/{name}": x.detach().numpy() for name, x in results.items()}
    np.savez_compressed(path, **saved)
    print(f"wrote {len(saved)} arrays to {path}")


def check(path: str) -> bool:
    import jax
    import jax.numpy as jnp

    import glax

    def solved(name: str, n: int, platform: str, a: dict):
        options = dict(initial_state=a["initial"], platform=platform)
        q, k, v, beta = (a[x] for x in ("q", "k", "v", "beta"))
        if name == "delta_rule":
            return glax.delta_rule(q, k, v, beta, **options)
        if name == "kda":
            return glax.kda(q, k, v, a["g"], beta, **options)
        # One row for each update: the gate at the first of a token, the query at the last.
        g = jnp.pad(a["g"][:, :, None], ((0, 0), (0, 0), (0, n - 1), (0, 0))).reshape(beta.shape)
        rows = jnp.pad(q[:, :, None], ((0, 0), (0, 0), (n - 1, 0), (0, 0), (0, 0))).reshape(
            *beta.shape[:2], *q.shape[2:]
        )
        outputs = glax.gated_delta_rule(rows, k, v, g, beta, **options)
        return outputs._replace(output=outputs.output[:, n - 1 :: n])

    saved, right = np.load(path), True
    for name, shapes in SHAPES.items():
        for i, shape in enumerate(shapes):
            prefix = f"{name}/{i}/"
            found = {key.removeprefix(prefix): x for key, x in saved.items() if key.startswith(prefix)}
            given = {key.removeprefix("in/"): x for key, x in found.items() if key.startswith("in/")}
            cotangents = given.pop("d_output"), given.pop("d_final")
            for platform in ("xla", "cpp"):
                outputs, pull = jax.vjp(lambda a, f=(name, shape[-1], platform): tuple(solved(*f, a)), given)
                got = dict(zip(("output", "final_state"), outputs, strict=True))
                got |= {f"d {key}": x for key, x in pull(cotangents)[0].items()}
                errors = {key: distance(x, found[f"out/{key}"]) for key, x in got.items()}
                misses = {key: e for key, e in errors.items() if e > (1e-4 if key.startswith("d ") else 2e-5)}
                right &= not misses
                print(
                    f"{name} {shape} {platform}: worst {max(errors.values()):.1e}", f"MISS {misses}" if misses else ""
                )
    return right


def distance(x, y) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(np.asarray(y, np.float64)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write:
        write(args.file)
    else:
        sys.exit(not check(args.file))
