"""An operation of a user's, which the tests of choosing and remembering configs run."""

import dataclasses

import jax
import jax.numpy as jnp

import glax


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    block: int


class Cumulative(glax.Kernel):
    """A user's operation: y_t = x_1 + ... + x_t, in blocks; some blocks fail, one is wrong, one has a wrong gradient."""

    op_id = "cumulative"

    def __init__(self, candidates=(8, 16)):
        self.candidates, self.runs = candidates, []

    def run(self, x, *, cfg, negate=False):
        self.runs.append((cfg.block, isinstance(x, jax.core.Tracer)))
        if cfg.block == 3:
            raise NotImplementedError("3 does not divide")
        total = jnp.cumsum(x, axis=0)
        if cfg.block == 4:
            total = total * 1.01
        if cfg.block == 5:
            total = jax.lax.stop_gradient(total)
        return -total if negate else total

    def heuristic_cfg(self, inv):
        return BlockConfig(16)

    def candidate_cfgs(self, inv):
        return [BlockConfig(block) for block in self.candidates]
