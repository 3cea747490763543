"""Declare who waits for whom in a kernel.

The warpgroups of a program have roles, such as load, carry and output. A `Pipeline` has the `Ring`, `Handoff` and `Meeting`
through which they pass tiles on. Each names the roles at both of its ends. The arrivals that a barrier waits for follow from
these, and so does the table in the docstring of each kernel's file. `acting_as` says which role is traced: it may then only do
what is declared of it.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any
Roles = Mapping[str, int]  # the number of warpgroups by role, in the order of the warpgroups
Names = tuple[str, ...]


class Wait(NamedTuple):
    """Hold a line of the table of who waits for whom: the roles that wait, the roles that are awaited, and until when."""

    waiting: Names
    awaited: Names
    until: str


class Traced(threading.local):
    """Hold, for each thread, the role whose work the thread traces; None outside of `acting_as`, where nothing is checked."""

    role: str | None = None


traced = Traced()


@contextlib.contextmanager
def acting_as(role: str) -> Iterator[None]:
    """Set the role that is traced within the `with` block. There, rings, handoffs and meetings raise ValueError for a use that
    is not declared for the role."""
    before, traced.role = traced.role, role
    try:
        yield
    finally:
        traced.role = before


def check(declared: Names, what: str):
    """Raise ValueError if the role being traced is not among the roles `declared` for this operation; do nothing if no role is
    being traced. what: the operation, for the message."""
    if traced.role is not None and traced.role not in declared:
        raise ValueError(
            f"the role {traced.role!r} must not {what}: the pipeline declares it for {', '.join(declared)}"
        )


def arrivals(roles: Roles, names: Names, teams: int = 1) -> int:
    """Return the number of arrivals that a barrier waits for: the warpgroups of the roles `names`, divided by `teams`, and at
    least 1.

    roles: the number of warpgroups of each role.
    """
    return max(sum(roles.get(name, 0) for name in names) // teams, 1)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Pass tiles through slots, which some roles fill ahead of those that read them.

    slots: the number of slots, of all teams together. fill: the roles that fill a slot. read: the roles that wait until it is
    full. copies: the names of the tiles that copies fill, one for each copy. A copy reports at its end that its tile is full;
    without copies the warpgroups report. released_by: the roles that report when they have read a slot; by default `read`.
    acquired_by: the roles that wait for these reports before the slot is filled again; by default `fill`. If `fill` or
    `released_by` is (), no role reports, because something else keeps the order. teams: the number of teams of a role, each
    with slots of its own. full, free: the barriers in shared memory, one for each slot, which `Pipeline.of` sets.

    The methods take `slot`, the index of a slot. They raise ValueError if the role being traced is not declared for them.
    """

    slots: int
    fill: Names
    read: Names
    copies: Names = ()
    released_by: Names | None = None
    acquired_by: Names | None = None
    teams: int = 1
    full: Ref = None
    free: Ref = None

    def barriers(self, roles: Roles) -> dict[str, plgpu.Barrier]:
        """Return the types of the barriers by field, full and free, as far as roles report to these. roles: the number of
        warpgroups of each role."""
        counts = {}
        if self.fill:
            counts |= dict(full=len(self.copies) or arrivals(roles, self.fill, self.teams))
        if self.readers:
            counts |= dict(free=arrivals(roles, self.readers, self.teams))
        return {end: plgpu.Barrier(num_arrivals=count, num_barriers=self.slots) for end, count in counts.items()}

    def waits(self, name: str) -> list[Wait]:
        """Return the table's lines for this ring, none if no role reads. name: the ring's field in its pipeline."""
        if not self.read:
            return []
        tiles = ", ".join(dict.fromkeys(self.copies))
        full = Wait(self.read, self.fill, f"{name} full" + f": {tiles}" * bool(tiles))
        return [full, Wait(self.acquired_by or self.fill, self.readers, f"{name} free")]

    @property
    def readers(self) -> Names:
        """Return the roles that report when they have read a slot."""
        return self.read if self.released_by is None else self.released_by

    def slot(self, step):
        """Return the slot of a step, if there is one team. step: the number of the fill, from 0."""
        return lax.rem(step, jnp.int32(self.slots))

    def acquire(self, slot, step=None):
        """Wait until the slot has been read. step: the number of the fill, from 0; the first `slots` fills do not wait. Without
        a step, always wait."""
        check(self.acquired_by or self.fill, "acquire a slot")

        def wait():
            plgpu.barrier_wait(self.free.at[slot])

        wait() if step is None else pl.when(step >= self.slots)(wait)

    def copy(self, source: Ref, tile: Ref, slot):
        """Start a copy from `source` in global memory that fills `tile`, a tile of the slot, in shared memory. Do not wait for
        the copy."""
        check(self.fill, "fill a slot")
        plgpu.copy_gmem_to_smem(source, tile, self.full.at[slot])

    def filled(self, slot):
        """Report that this warpgroup has filled its part of the slot."""
        check(self.fill, "fill a slot")
        plgpu.barrier_arrive(self.full.at[slot])

    def wait(self, slot):
        """Wait until the slot is full."""
        check(self.read, "read a slot")
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot):
        """Report that this warpgroup has read the slot."""
        check(self.readers, "release a slot")
        plgpu.barrier_arrive(self.free.at[slot])


@dataclasses.dataclass(frozen=True)
class Handoff:
    """Pass one tile, or several that are stored and read together, from some roles to others.

    store: the roles that store it. read: the roles that wait for it. copies: the names of the tiles that copies fill, one for
    each copy; without copies the warpgroups report. returned: whether the storing roles wait until the tile has been read
    before they store the next. full, free: the barriers in shared memory, which `Pipeline.of` sets; free is None unless
    `returned`.

    The methods raise ValueError if the role being traced is not declared for them.
    """

    store: Names
    read: Names
    copies: Names = ()
    returned: bool = True
    full: Ref = None
    free: Ref = None

    def barriers(self, roles: Roles) -> dict[str, plgpu.Barrier]:
        """Return the types of the barriers by field, full and free. roles: the number of warpgroups of each role."""
        used = any(name in roles for name in self.store) and any(name in roles for name in self.read)
        stored, read = (arrivals(roles, names) if used else 1 for names in (self.store, self.read))
        found = dict(full=plgpu.Barrier(num_arrivals=len(self.copies) or stored))
        return found | (dict(free=plgpu.Barrier(num_arrivals=read)) if self.returned else {})

    def waits(self, name: str) -> list[Wait]:
        """Return the table's lines for this handoff: which roles wait for which. name: the handoff's field in its pipeline."""
        tiles = ", ".join(dict.fromkeys(self.copies))
        full = Wait(self.read, self.store, f"{name} loaded: {tiles}" if tiles else f"{name} stored")
        return [full, *[Wait(self.store, self.read, f"{name} read")] * self.returned]

    @contextlib.contextmanager
    def storing(self, step=None) -> Iterator[None]:
        """Wait until the tile has been read, run the `with` block, which stores the next, and report that this is stored. step:
        the number of the store, from 0; the first does not wait. Without a step, always wait."""
        self.acquire() if step is None else pl.when(step > 0)(self.acquire)
        yield
        self.stored()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until the tile is stored, run the `with` block, which reads the tile, and report that it has been read."""
        self.wait()
        yield
        self.release()

    def acquire(self):
        """Wait until the tile has been read."""
        check(self.store, "store the tile")
        plgpu.barrier_wait(self.free)

    def copy(self, source: Ref, tile: Ref):
        """Start a copy from `source` in global memory that fills `tile` in shared memory. Do not wait for the copy."""
        check(self.store, "store the tile")
        plgpu.copy_gmem_to_smem(source, tile, self.full)

    def stored(self):
        """Report that this warpgroup has stored its part of the tile."""
        check(self.store, "store the tile")
        plgpu.barrier_arrive(self.full)

    def wait(self):
        """Wait until the tile is stored."""
        check(self.read, "read the tile")
        plgpu.barrier_wait(self.full)

    def release(self):
        """Report that this warpgroup has read the tile."""
        check(self.read, "read the tile")
        plgpu.barrier_arrive(self.free)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Let roles wait until all warpgroups of the roles `of` have arrived.

    waiting: the roles that wait; by default `of`. teams: the number of teams of a role, each with a meeting of its own.
    all_there: the barriers in shared memory, one for each team, which `Pipeline.of` sets.

    The methods raise ValueError if the role being traced is not declared for them.
    """

    of: Names
    waiting: Names = ()
    teams: int = 1
    all_there: Ref = None

    def barriers(self, roles: Roles) -> dict[str, plgpu.Barrier]:
        """Return the types of the barriers by field. roles: the number of warpgroups of each role."""
        count = arrivals(roles, self.of, self.teams)
        return dict(all_there=plgpu.Barrier(num_arrivals=count, num_barriers=self.teams))

    def waits(self, name: str) -> list[Wait]:
        """Return the table's line for this meeting: which roles wait for which. name: the meeting's field in its pipeline."""
        return [Wait(self.waiting or self.of, self.of, name)]

    def arrive(self, team=None):
        """Report that this warpgroup has arrived. team: its team, where there are several."""
        check(self.of, "arrive")
        plgpu.barrier_arrive(self.all_there if team is None else self.all_there.at[team])

    def wait(self, team=None):
        """Wait until all warpgroups of the meeting have arrived. team: the waiting team, where there are several."""
        check(self.waiting or self.of, "wait")
        plgpu.barrier_wait(self.all_there if team is None else self.all_there.at[team])


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Hold the rings, handoffs and meetings of a kernel, each a field of a subclass. A field that a plan does not need is None.

    ORDER: the order of barriers in shared memory, as "field.full", where it is not the order of the fields.
    """

    ORDER: ClassVar[Names] = ()

    def parts(self) -> dict[str, Ring | Handoff | Meeting]:
        """Return the rings, handoffs and meetings that are not None, by field name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: part for name, part in found.items() if part is not None}

    def barriers(self, roles: Roles) -> dict[str, plgpu.Barrier]:
        """Return the types of all barriers, by names such as "tokens.full" and in the order of shared memory."""
        parts = self.parts().items()
        found = {f"{name}.{end}": x for name, part in parts for end, x in part.barriers(roles).items()}
        return {name: found[name] for name in self.ORDER or found if name in found}

    def of(self, roles: Roles, refs: Sequence[Ref]) -> Self:
        """Return the pipeline with its barriers. refs: the references of the barriers, in the order of `barriers`."""
        changed = dict(self.parts())
        for name, ref in zip(self.barriers(roles), refs, strict=True):
            part, end = name.split(".")
            changed[part] = dataclasses.replace(changed[part], **{end: ref})
        return dataclasses.replace(self, **changed)

    def table(self, roles: Roles) -> str:
        """Return the text of a table of who waits for whom. Roles that the kernel does not have are left out. roles: the number
        of warpgroups of each role."""
        lines = [("waits", "for", "until")]
        for wait in (wait for name, part in self.parts().items() for wait in part.waits(name)):
            waiting, awaited = ([role for role in names if role in roles] for names in wait[:2])
            if waiting and awaited:
                lines.append((", ".join(waiting), ", ".join(awaited), wait.until))
        widths = [max(len(line[i]) for line in lines) + 2 for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}{b:<{widths[1]}}{until}" for a, b, until in lines)
