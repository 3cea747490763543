"""Time softmax attention over chosen blocks of keys, as prompts of Qwen4-Exp and GLM-5.3-Flash read them, beside all keys.

python benchmarks/chosen.py --json FILE                     # all problems but tiny, on one GPU
python benchmarks/chosen.py --problems glm --modes forward --iters 5
python benchmarks/chosen.py --problems tiny                 # anywhere, by XLA where there is no GPU

all:    every key that a row sees
chosen: a `glax.nn.choice.Choice` of random index queries and keys: the words of its blocks, and attention by them
words:  the words alone
random: attention alone, by the words of random blocks: hardly a tile of keys is left out
near:   attention alone, where all rows of 512 tokens read the same far blocks, and each its last ones; so many tiles are left out
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from meters import interleaved
from output import table, write

from glax._src.kernels.common.softmax import Intervals, ReadBlocks
from glax._src.solve.softmax import attend_in_blocks
from glax.cli.measure import Way
from glax.nn.choice import Choice

WAYS = ("all", "chosen", "words", "random", "near")


@dataclasses.dataclass(frozen=True)
class Problem:
    """B sequences of T tokens. Hq heads of width K read Hk heads, whose values have width V. index: the heads of the index, 128
    wide. A token reads `budget` others in blocks of `size`."""

    name: str
    B: int
    T: int
    Hq: int
    Hk: int
    K: int
    V: int
    index: int
    size: int
    budget: int = 2048

    def arrays(self):
        keys = jax.random.split(jax.random.key(0), 6)
        heads = (self.Hq, self.K), (self.Hk, self.K), (self.Hk, self.V), (self.Hq, self.V), (self.index, 128), (1, 128)
        return [jax.random.normal(key, (self.B, self.T, *x), jnp.bfloat16) for key, x in zip(keys, heads, strict=True)]

    def seen(self) -> Intervals:
        rows = jnp.broadcast_to(jnp.arange(self.T, dtype=jnp.int32), (self.B, self.T))
        return Intervals(jnp.zeros_like(rows), rows)

    def choice(self, query, key) -> Choice:
        def pool(keys, position):
            return keys.astype(jnp.float32).mean(-2)

        return Choice(query, key[:, :, 0], self.size, self.budget // self.size, pool)

    def drawn(self, near: bool) -> jax.Array:
        """Return words in which a row reads budget // size blocks before its own: half of them the last ones with `near`."""
        draw, n = np.random.default_rng(0), self.T // self.size
        best, words = self.budget // self.size, np.zeros((self.T, n // 32 + 1), np.uint32)
        for t in range(self.T):
            own = (t + 1) // self.size
            if own <= best:
                at = np.arange(own)
            elif near:
                far = np.random.default_rng(t // 512).permutation(max(t // 512 * 512 // self.size, best))[: best // 2]
                at = np.union1d(far[far < own], np.arange(own - best // 2, own))
            else:
                at = draw.choice(own, best, replace=False)
            np.bitwise_or.at(
                words[t], np.append(at, own) // 32, np.uint32(1) << (np.append(at, own) % 32).astype(np.uint32)
            )
        return jnp.broadcast_to(jnp.asarray(words.view(np.int32)), (self.B, *words.shape))


PROBLEMS = [
    Problem("tiny", 2, 256, 4, 2, 32, 32, 2, 4, 64),
    Problem("qwen4", 1, 4096, 24, 2, 256, 256, 4, 16),
    Problem("qwen4 long", 1, 16384, 24, 2, 256, 256, 4, 16),
    Problem("qwen4 longer", 1, 65536, 24, 2, 256, 256, 4, 16),
    Problem("glm", 1, 16384, 64, 64, 256, 256, 32, 4),
]


def attended(way: str, problem: Problem, words, q, k, v, query, key):
    if way == "all":
        return attend_in_blocks(q, k, v, problem.seen(), None)
    begin = jnp.zeros((problem.B, problem.T), jnp.int32)
    if way == "words":
        return problem.choice(query, key).read_blocks(key, problem.seen(), begin).words
    if way == "chosen":
        attend_all = functools.partial(attend_in_blocks, q, k, v, problem.seen(), None)
        return problem.choice(query, key).attend(attend_all, q, k, v, key, seen=problem.seen(), scale=None, begin=begin)
    return attend_in_blocks(q, k, v, problem.seen(), None, ReadBlocks(words, problem.size))


def program(way: str, problem: Problem, mode: str):
    def forward(words, q, k, v, d_o, query, key):
        return attended(way, problem, words, q, k, v, query, key)

    def train(words, q, k, v, d_o, query, key):
        o, pull = jax.vjp(lambda q, k, v: attended(way, problem, words, q, k, v, query, key), q, k, v)
        return o, *pull(d_o)

    return jax.jit(dict(forward=forward, train=train)[mode])


def measured(problem: Problem, mode: str, options) -> list[dict]:
    arrays, running = problem.arrays(), {}
    for way in options.ways:
        if way == "words" and mode == "train":
            continue
        words = problem.drawn(way == "near") if way in ("random", "near") else jnp.zeros(1, jnp.int32)
        call, given = program(way, problem, mode), (words, *arrays)
        jax.block_until_ready(call(*given))
        running[way] = Way(way, lambda call=call, given=given: call(*given))
    times = interleaved(list(running.values()), options.iters)
    lines = []
    for way, time in zip(running, times, strict=True):
        lines.append(
            dict(problem=problem.name, mode=mode, implementation=way, ms=time.median, p20=time.p20, p80=time.p80)
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [problem.name for problem in PROBLEMS]
    parser.add_argument("--problems", nargs="*", default=names[1:], choices=names)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--modes", nargs="*", default=["forward", "train"], choices=["forward", "train"])
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--json", type=Path, help="a file to write")
    options = parser.parse_args()
    lines = []
    for problem in (x for x in PROBLEMS if x.name in options.problems):
        for mode in options.modes:
            found = measured(problem, mode, options)
            print(table(found), flush=True)
            lines += found
    if options.json:
        write(options.json, lines)


if __name__ == "__main__":
    main()
