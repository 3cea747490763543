"""Poison one document of a call with NaN, inf or overflowing numbers, and find what changes in other documents' results.

A document is a sequence, or a segment of a row. A `Layout` packs documents into rows. `poisons` lists what may be put into which
document or padding of a call, and `leaks` names the results of other documents that differ from those of the clean call.
Poisons are data: one compiled program serves all poisons of a call.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.decay import USUAL_FORMS
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import KernelSpec
from glax._src.solve.dispatch import by_folding
from glax._src.solve.isolation import isolating
from glax.testing.cases import FORMS, Case, cotangents, recurrence

CUTS, T = (0, 70, 128, 190), 200  # the middle document begins inside a chunk of 64 tokens and ends at its edge
IDS = tuple(np.repeat([5, 2, 7, 0], np.diff((*CUTS, T))).tolist())
MIDDLE, PADDING = 1, -1
ERASURES = {"": (), "beta": ("beta",), "erase": ("erase",), "erase+write": ("erase", "write")}
DELTA_DECAYS = ("none", "head", "key")  # the decays with which the delta rule is tried


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Hold how documents are packed: by cu_seqlens, by segment_ids with padding, or as rows of a batch.

    fields: the fields of a `Case`. document_of: [B, T], the document of each token, or PADDING.
    documents: of each sequence of the call, in the order of time. poisoned: the document that is poisoned.
    """

    name: str
    fields: dict[str, Any]
    document_of: np.ndarray
    documents: tuple[tuple[int, ...], ...]
    poisoned: int = MIDDLE

    def __str__(self):
        return self.name

    def case(self, name: str, **fields) -> Case:
        """Return the case of that name of `cases`."""
        return next(case for case in self.cases(**fields) if case.name == name)

    def cases(self, **fields) -> Iterator[Case]:
        """Yield a case of each usual form of decay and erasure. `fields` are other fields of the cases."""
        for erasure, names in ERASURES.items():
            for form in USUAL_FORMS:
                if not names or form in DELTA_DECAYS:
                    shape = dict(K=16, V=16) | self.fields | fields
                    yield Case(f"{form} {erasure}".strip(), gates=FORMS[form], erasure=names, **shape)


def packed(cuts: tuple[int, ...] = CUTS, T: int = T) -> Layout:
    """Return a row of documents with these boundaries, by cu_seqlens."""
    n = len(cuts) - 1
    row = np.repeat([*range(n), PADDING], np.diff((*cuts, T)))
    return Layout("cu_seqlens", dict(B=1, T=T, cuts=cuts), row[None], tuple((i,) for i in range(n)))


def segmented(cuts: tuple[int, ...] = CUTS, T: int = T) -> Layout:
    """Return a row of documents with these boundaries and a row of one document, by segment_ids."""
    n = len(cuts) - 1
    row = np.repeat([*range(n), PADDING], np.diff((*cuts, T)))
    document_of = np.stack([row, np.full(T, n)])
    ids = tuple(tuple(x) for x in (document_of + 1).tolist())
    return Layout("segment_ids", dict(B=2, T=T, ids=ids), document_of, (tuple(range(n)), (n,)))


def batch(B: int = 3, T: int = 70) -> Layout:
    """Return documents of T tokens, one in each row."""
    return Layout("rows", dict(B=B, T=T), np.repeat(np.arange(B)[:, None], T, axis=1), tuple((i,) for i in range(B)))


LAST = dataclasses.replace(packed(), name="cu_seqlens, last", poisoned=2)  # padding follows the document
LAYOUTS = {layout.name: layout for layout in (packed(), segmented(), batch(), LAST)}


@dataclasses.dataclass(frozen=True, eq=False)
class Poison:
    """Hold a value, the array it is put into (a name of `arrays_of`), its places, and the documents that it may change."""

    array: str
    value: float
    places: np.ndarray
    owners: tuple[int, ...]
    title: str

    def __str__(self):
        return self.title


Operands = tuple[Recurrence, jax.Array, jax.Array]  # r, d_output, d_final
PER_SEQUENCE = ("initial_state", "d_final", "final_state", "decay.constant", "scale")


def arrays_of(tree) -> dict[str, jax.Array]:
    """Return the arrays of a Recurrence, without its integers, or of Outputs, by their paths, such as "decay.key"."""
    tree = tree.floats if isinstance(tree, Recurrence) else tree
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): x for path, x in leaves}


def operands_of(case: Case, strength: str = "log-sigmoid") -> Operands:
    """Return the operands of a case and of its gradient. Padding holds numbers, so that each array is poisoned alone."""
    r = recurrence(case, strength)
    return jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0.5, x) if is_float(x) else x, (r, *cotangents(case, r)))


def erasing_along(operands: Operands, before_decay: bool) -> Operands:
    """Return the operands of a case with "erase", where what is erased is taken along the reversed channels of the key."""
    r, *given = operands
    erasure = dataclasses.replace(r.erasing, along=r.k[..., ::-1], before_decay=before_decay)
    return r.replace(erasure=erasure), *given


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def poisons(layout: Layout, operands: Operands, few: bool = False) -> Iterator[Poison]:
    """Yield the poisons of a call: NaN, inf and a number that overflows in each array of the poisoned document and of padding.

    few: whether to yield only one value and place of each array, and all arrays with NaN together ("all").
    """
    r, d_output, d_final = operands
    arrays = {k: x for k, x in arrays_of(r).items() if k != "scale"} | dict(d_output=d_output, d_final=d_final)
    for i, (name, x) in enumerate(arrays.items()):
        overflow = 1e4 if name.startswith("decay") else float(jnp.finfo(x.dtype).max)
        values = dict(NaN=float("nan"), inf=float("inf"), overflow=overflow)
        values = dict([list(values.items())[i % 3]]) if few else values
        places = list(places_of(name, layout, r.reverse))
        for where, mask, owners in [places[i % len(places)]] if few else places:
            for title, value in values.items():
                yield Poison(name, value, mask, owners, f"{title} in {name}, {where}")


def places_of(name: str, layout: Layout, reverse: bool) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Yield (title, the places in the leading axes of the array, the documents that own them)."""
    if name in PER_SEQUENCE:
        n = next(i for i, documents in enumerate(layout.documents) if layout.poisoned in documents)
        owners = owners_of(name, layout.documents[n], reverse)
        yield f"sequence {n}", np.arange(len(layout.documents)) == n, owners
        return
    whole = layout.document_of == layout.poisoned
    tokens = np.flatnonzero(whole.any(0))
    for where, token in (("first token", tokens[0]), ("last token", tokens[-1])):
        yield where, whole & (np.arange(whole.shape[1]) == token), (layout.poisoned,)
    yield "every token", whole, (layout.poisoned,)
    if (layout.document_of == PADDING).any():
        yield "padding", layout.document_of == PADDING, ()


def owners_of(name: str, documents: tuple[int, ...], reverse: bool) -> tuple[int, ...]:
    """Return the documents of a sequence that own its entry of an array. States belong to the first or the last one."""
    if name in ("decay.constant", "scale"):
        return documents
    return documents[:1] if (name == "initial_state") != reverse else documents[-1:]


def poisoned(operands: Operands, poison: Poison) -> Operands:
    """Return the operands with the poison's value at its places."""

    def put(name: str, x):
        if name != poison.array:
            return x
        mask = poison.places.reshape(*poison.places.shape, *[1] * (x.ndim - poison.places.ndim))
        return jnp.where(mask, jnp.asarray(poison.value, x.dtype), x)

    r, d_output, d_final = operands
    leaves, structure = jax.tree_util.tree_flatten_with_path(r)
    r = structure.unflatten([put(jax.tree_util.keystr(path).lstrip("."), x) for path, x in leaves])
    return r, put("d_output", d_output), put("d_final", d_final)


def dispatched(spec: KernelSpec, run: Callable) -> Callable:
    """Return run, a function of spec's kernel, as calls run it: with segments folded and, where it mixes them, checked."""

    def program(r: Recurrence, *given):
        if r.segments is None or spec.takes_segments(r):
            return run(r, *given)
        return by_folding(isolating(run, r.segments) if spec.mixes_segments(r) else run)(r, *given)

    return program


Results = Outputs | Recurrence


def gradient_of(run: Callable[[Recurrence], Outputs]) -> Callable[..., Recurrence]:
    """Return (r, d_output, d_final) -> the gradient of run in every array of r."""

    def gradient(r: Recurrence, d_output, d_final) -> Recurrence:
        _, pull = jax.vjp(lambda floats: run(floats.with_integers(r)), r.floats)
        return pull(Outputs(d_output, d_final))[0]

    return gradient


def second_derivatives(run: Callable[[Recurrence], Outputs], of_cotangents: bool) -> Callable[..., Results]:
    """Return (r, d_output, d_final) -> the gradient of <gradient of run, r> in r, or in d_output and d_final as `Outputs`."""

    @jax.jit
    def second(r: Recurrence, d_output, d_final):
        def gradient(floats: Recurrence, *given):
            return gradient_of(run)(floats.with_integers(r), *given)

        _, pull = jax.vjp(gradient, r.floats, d_output, d_final)
        d_r, *rest = pull(r.floats)  # what poisons r poisons the direction, too
        return Outputs(*rest) if of_cotangents else d_r

    return second


def spoiled(
    layout: Layout, owners: tuple[int, ...], got: Results, clean: Results, reverse: bool, bar: float
) -> list[str]:
    """Return what differs from the clean results outside of `owners`: texts such as "v: 3 of 290 rows, not finite".

    Results differ if they are not finite or if ||got - clean|| > bar ||clean|| over the rows of other documents. Sums over the
    documents of a row, the gradients of `scale` and `decay.constant`, belong to all of its documents.
    """
    found = []
    clean_arrays = arrays_of(clean)
    for name, x in arrays_of(got).items():
        if name in PER_SEQUENCE:
            others = np.array([not set(owners_of(name, each, reverse)) & set(owners) for each in layout.documents])
        else:
            others = ~np.isin(layout.document_of, np.array(owners, int))
        x, want = (np.asarray(y, np.float64)[others] for y in (x, clean_arrays[name]))
        rows = x.reshape(len(x), math.prod(x.shape[1:]))
        bad = ~np.isfinite(rows).all(1)
        if bad.any():
            found.append(f"{name}: {bad.sum()} of {len(bad)} rows not finite")
        elif len(rows) and np.linalg.norm(x - want) > bar * np.linalg.norm(want):
            error = np.linalg.norm(x - want) / max(np.linalg.norm(want), 1e-300)
            found.append(f"{name}: off by {error:.1e}")
    return found


def leaks(
    layout: Layout,
    operands: Operands,
    run: Callable[[Recurrence], Outputs] | None,
    gradient: Callable[..., Results] | None,
    *,
    few: bool = False,
    bar: float = 1e-3,
) -> list[str]:
    """Return each result of `run` and `gradient` that a poison changes outside of its documents, as text.

    run: r -> Outputs. gradient: (r, d_output, d_final) -> Recurrence or Outputs. Either is None where it is not to be
    tried. Raises AssertionError if a result of the clean call is not finite.
    """
    found, reverse = [], operands[0].reverse

    def forward(r: Recurrence, *_):
        assert run is not None
        return run(r)

    programs = [("forward", forward)] if run is not None else []
    programs += [("gradient", gradient)] if gradient is not None else []
    for kind, program in programs:
        clean = program(*operands)
        assert not spoiled(layout, (), clean, clean, reverse, bar), f"the {kind} of the clean call is not finite"
        for poison in poisons(layout, operands, few):
            if kind == "gradient" or not poison.array.startswith("d_"):
                got = program(*poisoned(operands, poison))
                differs = spoiled(layout, poison.owners, got, clean, reverse, bar)
                found += [f"{kind}, {poison}: {text}" for text in differs]
    return found
