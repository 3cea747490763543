"""docs/adding_a_kernel.md runs, and what it says happens."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from tests.close import assert_close

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "adding_a_kernel.md").read_text()


def test_a_third_party_kernel_is_chosen_differentiated_tuned_and_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    load_kernels()
    before = dict(kernel_registry.kernels)
    q = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    plain = glax.recurrent(q, q, q)
    slope = jax.grad(lambda q: glax.recurrent(q, q, q).output.sum())(q)
    names: dict = {}
    try:
        jax.clear_caches()
        exec(
            compile("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), "adding_a_kernel.md", "exec"),
            names,
        )
        assert "quadratic/xla/any: QuadraticConfig(block=64), by heuristic" in capsys.readouterr().out
        assert_close("output", names["output"], plain.output, 1e-5)
        assert_close("final_state", names["state"], plain.final_state, 1e-5)
        assert_close("gradient", names["gradient"], slope, 5e-5)
        (measurement,) = names["measured"].values()
        assert set(measurement.candidates) == {"QuadraticConfig(block=32)", "QuadraticConfig(block=64)"}
        assert [path.name.split("@")[0] for path in tmp_path.rglob("*.json")] == ["quadratic.xla.any"]
        (decision,) = glax.explain(glax.recurrent, q, q, q)
        assert (decision.config, decision.selector) == (measurement.config, "memory")
        refused = glax.explain(lambda q: glax.recurrent(q, q, q, g=jnp.zeros(q.shape[:3])), q)[0].refused
        assert refused["quadratic/xla/any"] == "decays are not written"
    finally:
        kernel_registry.kernels.clear()
        kernel_registry.kernels.update(before)
        jax.clear_caches()
    np.testing.assert_array_equal(glax.recurrent(q, q, q).output, plain.output)
