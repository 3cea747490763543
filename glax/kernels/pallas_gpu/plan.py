"""What a walk is compiled for."""

import dataclasses

C = 64  # tokens a chunk: the rows of one warpgroup's product


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a walk is compiled for. outputs: o and q, else the states at every chunk (`states`) or only the last.

    adjoint: of dL/dS against time, from q and d_output in place of k and v. Heads of a, b and q divide H.
    terms: arrays of bfloat16 of which gates a key channel are the sum. columns: of the state in a program, 64 or 128.
    """

    H: int
    K: int
    V: int
    reverse: bool = False
    adjoint: bool = False
    outputs: bool = True
    states: bool = False
    start: bool = False
    columns: int = 128
    terms: int = 1

    @property
    def stages(self) -> int:
        """Chunks in shared memory at a time: what 227 KB hold at widths of 128."""
        return (3 if self.outputs else 4) - (self.terms - 1)

    @property
    def descending(self) -> bool:
        return self.reverse != self.adjoint

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: one for the outputs and one for the state, or one for 64 columns of the state."""
        return 2 if self.outputs else self.columns // 64
