"""The limits of log decays that run-time checks use in float32, each derived once for all platforms.

**A chunk about its middle.** M_i is the sum of log gates from a chunk's middle through its token i, negated before the middle;
L and R are the sums over its first and its second half; S is the state that enters it. The factors

    q_i e^{M_i}        k_j e^{-M_j}        e^L S        e^R X        with X = e^L S + sum_j (k_j e^{-M_j}) v_j^T

are each rounded and stored by themselves. A check therefore holds |M_i|, |L| and |R| to FAST_LIMIT = 60, in every channel:

    e^60 = 1.1e26, and LARGEST = 3.4e38 = 2.9e12 e^60
    e^-60 = 8.8e-27, and LEAST_NORMAL = 1.2e-38 = 1.3e-12 e^-60

which leaves twelve digits on either side for q, k, v, S and their sums. These products are formed of two factors:

    (q_i e^{M_i}) (k_j e^{-M_j}) = q_i k_j e^{G_i - G_j}    j <= i. For j > i it may be inf, and a select drops it.
    (q_i e^{M_i}) (e^L S)        = e^{G_i} q_i S            The first tokens read back all that e^L took.
    e^R X                                                   The state behind the chunk, at its true size.
    e^{L'} (e^R X)                                          The state at the middle of the next chunk, whose L is L'.
    (e^L S) (e^R dS)             = e^{L + R} S dS           With dS = dL/dS behind the chunk: in the gradient of gates.

A result below LEAST_NORMAL is that small in exact arithmetic too. The fourth is the one that must not underflow: X holds up to
e^60 of the state, and the next chunk reads it back through e^{M_i} up to e^60. It takes two multiplications, e^R first, because
the single factor e^{R + L'} may be e^-120, and float32 has nothing below e^-103.

XLA's chunks multiply q and k by e^L and e^R, not the states: (q_i e^{M_i}) e^L and (k_j e^{-M_j}) e^R. So states of true size
pass from chunk to chunk, S may be of any size, and with per-key gates v too. Their gradient has, with q in the place of k for dk,

    (sum_j d_output_i v_j k_j e^{-M_j}) e^{M_i}             Here the three factors together have twelve digits.

**Decays as they are.** All other factors are decays from one token to a later one: e^{G_i}, e^{G_last - G_j}, or those of a
whole chunk, segment or shard. They multiply q, k or a state of true size, so they underflow only where the result does. No check
is needed.

**The native scan** divides by decays since its last restart (cpu/native/scan.h). |G| is at most 40, or 20 on either side where
rows and columns both have gates. A restart multiplies by e^{G + g} in one factor, with g the gate that passed the limit: it is
subnormal only for g < -47, a decay of 1e-20 beside the token's own k v. Two kinds of product can leave float32's range:

    S / P and y / P    up to e^40 = 2.4e17 of the state and, with gates on columns, of the output. From 1.4e21 on they overflow
                       into inf or NaN, which no later product removes. The scan looks for these in what it holds at the end,
                       and the call is then computed again with |G| <= 1.
    b P                down to e^-40 of q, or of k, v or d_output in a gradient. What is below LEAST_NORMAL e^40 = 2.8e-21
                       underflows: 3e-8 of a row whose largest element is 1e-13. Blocks that begin with a fainter row
                       have |G| <= 1.

**Valid inputs.** Where gates come near a limit, |q|, sums of |k| |v| over a chunk, and |S| must stay below LARGEST times e^-60,
2.9e12. In XLA's chunks these are |q|, |k| and, with one decay a head, |v|; in gradients |d_output| |v| |k| and
|d_output| |v| |q|. From there down to 1e-7 they have all digits; at 1e-10 some five are left, below 1e-12 none. Natively, and
where gates are weak, only the results, the states and the states' gradients must be in range.
"""

FAST_LIMIT = 60.0
# e^-128 is 0 in float32, and so is that of every gate below. The cut keeps -inf out of differences, and sums of 64 gates above
# -2^13, where float32 still resolves 1e-3.
LOG_OF_ZERO = -128.0
# Half of the least number, 2^-150 = e^-103.97, rounds to 0: so does every decay below e^-104, subnormal numbers included.
LOG_OF_NOTHING = -104.0
