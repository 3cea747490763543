// One token's decay of the state.
//
// A factor e^g would round equal gates next to 0 in the same direction at every token: 2600 gates of -1e-6 would be off by 8e-5.
// A mild gate is therefore held as its change e^g - 1, of which S + S (e^g - 1) is rounded once.

struct Factor {
  float by;    // e^g - 1 where the gate is mild, else e^g
  float rest;  // 1 where the gate is mild, else 0
};

__device__ inline Factor factor_of(float g) {
  const bool mild = fabsf(g) < 0.5f;  // below that, expm1f(g) + 1 would lose digits of a small e^g
  return mild ? Factor{expm1f(g), 1.0f} : Factor{expf(g), 0.0f};
}

// The product of two factors.
__device__ inline Factor both(Factor x, Factor y) {
  if (x.rest != 0.0f && y.rest != 0.0f) return {fmaf(x.by, y.by, x.by + y.by), 1.0f};
  return {(x.by + x.rest) * (y.by + y.rest), 0.0f};
}

// S times its decay, and `added`. S itself comes last: its rounding then depends on what is added, which differs from token to
// token, so that equal gates do not round alike.
__device__ inline float decayed(float S, Factor f, float added) {
  const float change = fmaf(S, f.by, added);
  return f.rest != 0.0f ? S + change : change;
}
