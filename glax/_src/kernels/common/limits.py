"""Derive the limits of log decays that run-time checks use in float32, once for all platforms.

**The fast form of a chunk.** M_i is the sum of log gates from the chunk's middle through token i, negated before the middle. L
and R are the sums over the first and the second half. S is the state before the chunk, G_i the sum of log gates through token i,
and X the state at the middle. The factors

    q_i e^{M_i}        k_j e^{-M_j}        e^L S        e^R X        with X = e^L S + sum_j (k_j e^{-M_j}) v_j^T

are each rounded and stored. A kernel takes this form only if |M_i|, |L| and |R| are at most FAST_LIMIT = 60 in every channel:

    e^60 = 1.1e26, and LARGEST = 3.4e38 = 2.9e12 e^60
    e^-60 = 8.8e-27, and LEAST_NORMAL = 1.2e-38 = 1.3e-12 e^-60

This leaves a factor of 1e12 on either side for q, k, v, S and their sums. The kernels form these products of two factors:

    (q_i e^{M_i}) (k_j e^{-M_j}) = q_i k_j e^{G_i - G_j}    j <= i. For j > i it may be inf, and a select drops it.
    (q_i e^{M_i}) (e^L S)        = e^{G_i} q_i S            The first tokens undo the decay e^L.
    e^R X                                                   The state after the chunk, at its true size.
    e^{L'} (e^R X)                                          The state at the middle of the next chunk, whose L is L'.
    (e^L S) (e^R dS)             = e^{L + R} S dS           dS is the gradient of the state after the chunk.

Where one of these results is below LEAST_NORMAL, it is that small in exact arithmetic too. The fourth product must not
underflow: X may be e^60 times the state, and the next chunk multiplies by e^{M_i}, up to e^60. Two multiplications form it, by
e^R first. The single factor e^{R + L'} may be e^-120, and float32 has no number below e^-103.

The XLA kernels multiply q and k by e^L and e^R instead of the states: (q_i e^{M_i}) e^L and (k_j e^{-M_j}) e^R. The states that
pass from chunk to chunk have their true size, so S may have any size, and with per-key gates v too. The gradient dq contains

    (sum_j d_output_i v_j k_j e^{-M_j}) e^{M_i}             The product of the three operands has a range of 1e12.

and dk the same with q in the place of k.

**A chunk out of range on Hopper**, with per-key gates, takes the sums of gates behind and through a token from the same three:

    k_j e^{R - M_j}        q_i e^{L + M_i}        e^{L + R} S

These are plain decays, which exceed 1 only where gates let the state grow. L and R are sums of 32 gates of at least -128 and
stay above -2^12, where float32 resolves 2^-11. A difference of two is then off by no more than that, and so is the factor, which
bfloat16 rounds to 2^-9.

**Plain decays.** All other factors are decays from one token to a later one: e^{G_i}, e^{G_last - G_j}, or the decay of a whole
chunk, segment or shard. They multiply q, k or a state of true size, so they underflow only where the result does. They need no
check.

**The native scan** divides by the decay since its last restart (cpu/native/scan.h). |G| is at most 40, or 20 on either side where
rows and columns both have gates. A restart multiplies by e^{G + g} in one factor, with g the gate that passed the limit: it is
subnormal only for g < -47, where the decayed state is 1e-20 beside the k v^T of that token. Two kinds of product can leave the
range of float32:

    S / P and y / P    up to e^40 = 2.4e17 of the state and, with gates on columns, of the output. From 1.4e21 on they overflow
                       into inf or NaN, which no later product removes. The scan checks the values that it holds at the end
                       for these, and the call is then computed again with |G| <= 1.
    b P                down to e^-40 of q, or of k, v or d_output in a gradient. What is below LEAST_NORMAL e^40 = 2.8e-21
                       underflows: 3e-8 of a row whose largest element is 1e-13. Blocks that begin with a fainter row
                       have |G| <= 1.

**Valid inputs.** Where gates come near a limit, |q|, sums of |k| |v| over a chunk, and |S| must stay below LARGEST times e^-60,
2.9e12. In the XLA kernels these are |q|, |k| and, with per-head gates, |v|; in gradients |d_output| |v| |k| and
|d_output| |v| |q|. From there down to 1e-7 results have all digits; at 1e-10 about five are left, below 1e-12 none. In the
native kernels, and where gates are weak, only the results, the states and the states' gradients must be in range.
"""

FAST_LIMIT = 60.0
# e^-128 is 0 in float32, and so is the exponential of every lower gate. Gates are raised to this floor, so that differences are
# never -inf minus -inf, and sums of 64 gates stay above -2^13, where float32 still resolves 1e-3.
LOG_OF_ZERO = -128.0
# 2^-150 = e^-103.97 is half of the least subnormal float32 number and rounds to 0. So does every decay below e^-104.
LOG_OF_NOTHING = -104.0
