"""Read the options of rotary positions, and form the inverse frequencies that they ask for. The formulas are those of
transformers, in float64."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from glax.models.config import Options, UnsupportedOption, is_finite
from glax.nn.rotary import Rotation

# rope_type -> the options that it must have. The others of READ_INSIDE may be missing.
REQUIRED_INSIDE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "yarn": ("factor",),
}
# Options that the code of one rope_type or another reads; it passes over those of the other types.
READ_INSIDE = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "short_factor", "truncate", "type",
)  # fmt: skip
WITH_LENGTHS = ("llama3", "longrope", "yarn")  # the types that read original_max_position_embeddings
# Kinds of layers. Under such a name the code reads rotary positions of that kind alone.
KINDS_INSIDE = frozenset({
    "attention", "chunked_attention", "full_attention", "hybrid", "linear_attention", "mamba", "mlp", "moe", "sliding_attention",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rope:
    """Hold theta, the share of a head's channels that rotate, and the scaling of the inverse frequencies.

    theta: the base; None where nothing rotates. partial: the share. theta_key, partial_key: the names of theta and partial in
    config.json, for messages. kind: the rope_type. inner: the options of the scaling; None for no scaling. original: the length
    in tokens of the sequences before scaling. ratio: max_position_embeddings / original.
    """

    theta: float | None
    partial: float
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    kind: str = "default"
    inner: Options | None = None
    original: int = 1
    ratio: float = 1.0

    def arguments(self, head_width: int) -> dict[str, Any]:
        """Return the arguments of `Attention` for its rotation: theta, and rotary_width or frequencies.

        Raises UnsupportedOption if an odd number of channels or none would rotate, and ValueError if theta is None.
        """
        if self.theta is None:
            raise ValueError(f"{self.theta_key} in config.json must be a finite number, got None")
        if self.kind == "proportional" and self.inner is not None:
            return dict(theta=self.theta, frequencies=self.proportional(self.inner, head_width))
        width = int(head_width * self.partial)
        if width % 2 or width == 0:
            raise UnsupportedOption(
                f"{self.partial_key}={self.partial!r} in config.json is not supported: {width} of the {head_width} channels "
                "of a head would rotate, which must be an even number"
            )
        if self.inner is None:
            return dict(theta=self.theta, rotary_width=width)
        scaled = {"linear": self.linear, "llama3": self.llama3, "longrope": self.longrope, "yarn": self.yarn}[self.kind]
        plain = np.asarray(Rotation.of_base(self.theta, width).frequencies)
        return dict(theta=self.theta, frequencies=scaled(self.inner, plain))

    def proportional(self, inner: Options, head_width: int) -> Rotation:
        """Return the rotation in which the share `partial` of the pairs, the first ones, has the angles of a full rotation
        divided by the `factor` of `inner`, and the other pairs have an angle of 0."""
        if head_width % 2:
            raise inner.unsupported("rope_type", f"a head must have an even number of channels, got {head_width}")
        plain = np.asarray(Rotation.of_base(self.theta or 0.0, head_width).frequencies)
        rotates = np.arange(head_width // 2) < int(self.partial * head_width // 2)
        return Rotation(floats(np.where(rotates, plain, 0.0) / inner.number("factor", 1.0, above=0)))

    def linear(self, inner: Options, plain: np.ndarray) -> Rotation:
        """Return the rotation with the inverse frequencies plain / factor. inner: the options, with `factor`. plain: the
        inverse frequencies without scaling, one for each pair."""
        return Rotation(floats(plain / inner.number("factor", above=0)))

    def llama3(self, inner: Options, plain: np.ndarray) -> Rotation:
        """Return the rotation whose inverse frequencies are plain / factor for long waves, plain for short waves, and
        interpolated between the limits low_freq_factor and high_freq_factor. inner, plain: as in `linear`. Dubey et al. 2024,
        https://arxiv.org/abs/2407.21783."""
        low, high = (inner.number(f"{name}_freq_factor", above=0) for name in ("low", "high"))
        if low >= high:
            raise inner.unsupported("low_freq_factor", f"it must be below high_freq_factor={high:g}")
        turns = self.original * plain / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return Rotation(floats((1 - share) * plain / inner.number("factor", above=0) + share * plain))

    def longrope(self, inner: Options, plain: np.ndarray) -> Rotation:
        """Return the rotation with the inverse frequencies plain / short_factor, or plain / long_factor for sequences of more
        than `original` tokens. Each factor is a list, one number for each pair. inner, plain: as in `linear`. Ding et al. 2024,
        https://arxiv.org/abs/2402.13753."""
        both = []
        for key in ("short_factor", "long_factor"):
            given = inner.take(key)
            if not isinstance(given, list | tuple) or len(given) != len(plain) or not all(map(is_positive, given)):
                raise inner.unsupported(key, f"it must be {len(plain)} numbers above 0, one for each pair of channels")
            both.append(floats(plain / np.asarray(given, np.float64)))
        factor = inner.number("factor", None, optional=True, above=0) or self.ratio
        usual = math.sqrt(1 + math.log(factor) / math.log(self.original)) if factor > 1 else 1.0
        return Rotation(both[0], self.attention_factor(inner, usual), both[1], self.original)

    def yarn(self, inner: Options, plain: np.ndarray) -> Rotation:
        """Return the rotation whose inverse frequencies are plain / factor for long waves, plain for short waves, and between
        them a linear ramp over the pairs of channels. inner, plain: as in `linear`. Peng et al. 2023,
        https://arxiv.org/abs/2309.00071."""
        factor, width = inner.number("factor", None, optional=True, above=0) or self.ratio, 2 * len(plain)
        turns = (inner.number(f"beta_{name}", None, optional=True, above=0) for name in ("fast", "slow"))
        fast, slow = (given or usual for given, usual in zip(turns, (32, 1), strict=True))
        base = self.theta or 0.0
        if base <= 1:
            raise inner.unsupported("rope_type", f"rope_theta must be above 1, got {self.theta!r}")

        def channel(turns: float) -> float:
            """Return the index, a float, of the pair of channels that turns `turns` times over the original length."""
            return width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = channel(fast), channel(slow)
        if inner.flag("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
        scales = (inner.number(key, None, optional=True) for key in ("mscale", "mscale_all_dim"))
        above, below = (given or 0.0 for given in scales)
        usual = attention_scale(factor, above) / attention_scale(factor, below) if above and below else None
        usual = attention_scale(factor, 1.0) if usual is None else usual
        return Rotation(floats(plain / factor * ramp + plain * (1 - ramp)), self.attention_factor(inner, usual))

    @staticmethod
    def attention_factor(inner: Options, usual: float) -> float:
        """Return the factor of the channels that rotate: the option attention_factor of `inner`, or `usual` if that is missing
        or null."""
        given = inner.number("attention_factor", None, optional=True, least=0)
        return usual if given is None else given


def attention_scale(factor: float, scale: float) -> float:
    """Return 0.1 scale log(factor) + 1, YaRN's factor of rotated channels; 1 if factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def is_positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def rotation(
    options: Options,
    theta: float,
    positions: int,
    partial: float | None = None,
    *,
    is_fixed: bool = False,
    ignored: tuple[str, ...] = (),
    length_key: str = "max_position_embeddings",
) -> Rope:
    """Return the rotary positions that a config asks for. Raises UnsupportedOption for a rope_type that is not supported.

    theta, positions: rope_theta and max_position_embeddings of a config without them.
    partial: the share of the channels that rotate for a config without partial_rotary_factor; None for models whose own code
    does not read that factor, where all channels rotate. is_fixed: whether partial_rotary_factor counts inside rope_parameters
    alone.
    ignored: further options of rope_parameters, which have no effect.
    length_key: the option with the length in tokens of the longest sequence; `Rope.ratio` is this length divided by `original`.

    Older versions of transformers write rope_theta and rope_scaling, newer versions rope_parameters. A rope_scaling that is not
    empty replaces rope_parameters.
    """
    base = options.number("rope_theta", theta, optional=True, above=0)
    share = options.number("partial_rotary_factor", 1.0 if partial is None else partial, optional=True)
    share = 1.0 if share is None else share
    share = partial if is_fixed and partial is not None else share
    key, value = given_parameters(options)
    inner = options.part(key, {} if value is None else value, read=KINDS_INSIDE)
    found = of_parameters(options, options, key, inner, base, share, partial, ignored)
    if found.kind not in WITH_LENGTHS:
        options.ignore("original_max_position_embeddings")
        return found
    longest = options.integer(length_key, positions)
    without = options.integer("max_position_embeddings", positions)  # transformers reads no other name here
    original = inner.integer("original_max_position_embeddings", without)
    original = options.integer("original_max_position_embeddings", original)
    return dataclasses.replace(found, original=original, ratio=longest / original)


def rotations(
    options: Options, kinds: Sequence[str], usual: dict[str, dict], theta: float, positions: int
) -> dict[str, Rope]:
    """Return the rotary positions of each kind of layers, from the part of rope_parameters with its name.

    usual: rope_parameters for a config that lacks them. theta: rope_theta for a part that lacks it, if the config lacks it too.
    positions: max_position_embeddings for a config that lacks it. A part of rope_type "default" rotates all channels, whatever
    its partial_rotary_factor. `truncate` is read beside the parts, not within them. Raises UnsupportedOption if a kind has no
    part.
    """
    base = options.number("rope_theta", theta, optional=True, above=0)
    share = options.number("partial_rotary_factor", 1.0, optional=True)
    key, given = given_parameters(options)
    longest = options.integer("max_position_embeddings", positions)
    options.ignore("original_max_position_embeddings")  # the parts have their own
    parts, found = options.part(key, usual if given is None else given, read=frozenset({*kinds, "truncate"})), {}
    shared = dict(truncate=parts.flag("truncate", True))
    for kind in kinds:
        value = parts.take(kind, None)
        inner = parts.part(kind, value | shared if isinstance(value, dict) else value, read=KINDS_INSIDE)
        rope = of_parameters(options, parts, kind, inner, base, 1.0 if share is None else share, None, ())
        if rope.kind in WITH_LENGTHS:
            original = inner.integer("original_max_position_embeddings", longest)
            rope = dataclasses.replace(rope, original=original, ratio=longest / original)
        found[kind] = rope
    parts.finish()
    return found


def given_parameters(options: Options) -> tuple[str, Any]:
    """Return (the name of the option that holds the parameters of rotary positions, its value or None)."""
    given, older = options.take("rope_parameters", None), options.take("rope_scaling", None)
    return ("rope_scaling", older) if older else ("rope_parameters", given)


def of_parameters(
    options: Options,
    holder: Options,
    key: str,
    inner: Options,
    base: float | None,
    share: float,
    partial: float | None,
    ignored: tuple[str, ...],
) -> Rope:
    """Return the rotary positions that the options `inner` describe, with `original` and `ratio` left at 1. inner: the value of
    `key` in `holder`.

    base, share: theta and the rotated share of channels in `options`, used if `inner` has none. partial, ignored: as in
    `rotation`.
    """
    kind = inner.take("rope_type", inner.take("type", "default"))
    if not isinstance(kind, str) or kind not in REQUIRED_INSIDE:
        known = ", ".join(map(repr, REQUIRED_INSIDE))
        raise holder.unsupported(key, f"rope_type must be one of {known}, got {kind!r}")
    if missing := [name for name in REQUIRED_INSIDE[kind] if name not in inner.values]:
        raise holder.unsupported(key, f"rope_type {kind!r} must come with {', '.join(missing)}")
    base = inner.number("rope_theta", base, optional=True, above=0)
    is_read = partial is not None or kind == "proportional"  # whether the share counts
    given = inner.number("partial_rotary_factor", share, optional=kind == "default" and not is_read)
    share = 1.0 if given is None else given
    inner.ignore(*READ_INSIDE, *ignored)
    inner.finish()
    theta_key, partial_key = (
        f"{inner.inside if name in inner.values else options.inside}{name}"
        for name in ("rope_theta", "partial_rotary_factor")
    )
    if is_read and not (0 < share <= 1 or (kind == "proportional" and share == 0)):
        raise ValueError(f"{partial_key} in config.json must be above 0 and at most 1, got {share!r}")
    if not is_read and kind != "default" and share != 1:
        named = inner if "partial_rotary_factor" in inner.values else options
        raise named.unsupported("partial_rotary_factor", f"with rope_type {kind!r} it must be 1")
    found = Rope(base, share if is_read else 1.0, theta_key, partial_key)
    return found if kind == "default" else dataclasses.replace(found, kind=kind, inner=inner)
