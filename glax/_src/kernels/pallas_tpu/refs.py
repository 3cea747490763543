"""Define classes with the references of each kernel by name.

A kernel reads inputs, writes outputs, and holds values between steps in scratch memory. A field is None if the call has no such
array. Shapes are those of one step's block; C, K, V and R are a plan's chunk, padded widths and `gate_rows`.
H is the number of a program's heads, and `heads` the number of heads of the array that it reads.
"""

from typing import Any, NamedTuple

Ref = Any  # a Pallas reference, whose type JAX does not export, or None where the default is None


class ForwardRefs(NamedTuple):
    """Hold the references of the forward kernel: blocks of the operands and results for one step. Fields that a call lacks are
    None."""

    q: Ref  # [C, heads * K]
    k: Ref  # [C, heads * K]
    v: Ref  # [C, heads * V]
    output: Ref  # [C, H * V]
    final_state: Ref  # [heads, K, V]
    state: Ref  # scratch [units, pack * V, pack * K]
    gates: Ref = None  # [R, C], or [R, 1] if constant
    key_gates: Ref = None  # [C, H * K]
    initial_state: Ref = None  # [heads, K, V]
    beta: Ref = None  # [R, C]
    erase: Ref = None  # [C, H * K]
    write: Ref = None  # [C, H * V]


class StateRefs(NamedTuple):
    """Hold the references of the kernel that saves the state before each chunk. Fields that a call lacks are None."""

    k: Ref  # [C, heads * K]
    v: Ref  # [C, heads * V]
    states_before: Ref  # [units, pack * V, pack * K]
    state: Ref  # scratch [units, pack * V, pack * K]
    gates: Ref = None  # [R, C], or [R, 1] if constant
    key_gates: Ref = None  # [C, H * K]
    initial_state: Ref = None  # [heads, K, V]
    beta: Ref = None  # [R, C]
    erase: Ref = None  # [C, H * K]
    write: Ref = None  # [C, H * V]
    inverses: Ref = None  # [units * pack, C, C]: of the delta rule, (I + L)^-1 of each head


class BackwardRefs(NamedTuple):
    """Hold the references of the backward kernel: blocks of the operands and gradients for one step. Fields that a call lacks
    are None."""

    q: Ref  # [C, heads * K]
    k: Ref  # [C, heads * K]
    v: Ref  # [C, heads * V]
    d_output: Ref  # [C, H * V]
    d_final: Ref  # [heads, K, V]
    states_before: Ref  # [units, pack * V, pack * K]
    dq: Ref  # [C, heads * K]
    dk: Ref  # [C, heads * K]
    dv: Ref  # [C, heads * V]
    d_scale: Ref  # [units, 1, pack * K + C], terms to be summed
    d_state: Ref  # scratch [units, pack * V, pack * K]
    scale_terms: Ref  # scratch [units, 1, pack * K + C]
    gates: Ref = None  # [R, C], or [R, 1] if constant
    key_gates: Ref = None  # [C, H * K]
    beta: Ref = None  # [R, C]
    erase: Ref = None  # [C, H * K]
    write: Ref = None  # [C, H * V]
    inverses: Ref = None  # [units * pack, C, C]: of the delta rule, (I + L)^-1 of each head
    d_initial: Ref = None  # [heads, K, V]
    d_gates: Ref = None  # [R, C]
    d_key_gates: Ref = None  # [C, H * K]
    d_constant: Ref = None  # [R, C], terms to be summed
    d_beta: Ref = None  # [R, C]
    d_erase: Ref = None  # [C, H * K]
    d_write: Ref = None  # [C, H * V]
    row_terms: Ref = None  # scratch [C, 128]: sums over the rows of pairs, one column for each head
    column_terms: Ref = None  # scratch [R, C]: sums over the columns of pairs, None if row_terms is less these
    edge_terms: Ref = None  # scratch [R, pack * K]: <S, dS> before the chunk, by key channel
    constant_terms: Ref = None  # scratch [R, C]
    beta_terms: Ref = None  # scratch [C, 128]: the gradient of beta, one column for each head
