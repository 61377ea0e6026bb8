// gelu of sixteen numbers, in both forms.
#pragma once

#include "cpu/simd.h"

namespace simd {

// In its tanh form. (1 + tanh t) / 2 is the sigmoid of 2 t, here with 2 sqrt(2 / pi). It is precise even when tanh is
// near -1.
static inline vf gelu_tanh(vf x) { return x / (1.0f + exp((x + x * x * x * 0.044715f) * -1.5957691f)); }

// In its exact form, x times the normal distribution's share below x. That is erfc(z) / 2 for z = -x / sqrt(2), and
// log erfc(z) = z P(z) for z in 0 .. 5.5, with P by least largest error of erfc; behind 5.5 erfc counts as 0. The error is
// below 3e-8 + 1e-6 |gelu(x)|, and below 4e-5 |gelu(x)| for x from -4 to 0.
static inline vf gelu_erf(vf x) {
    const vf scaled = x * 0.70710678f, z = scaled < 0.0f ? -scaled : scaled;
    vf p = splat(-3.3592175e-7f);
    p = mul_add(p, z, splat(8.324679e-6f));
    p = mul_add(p, z, splat(-8.610338e-5f));
    p = mul_add(p, z, splat(4.7015416e-4f));
    p = mul_add(p, z, splat(-1.2801333e-3f));
    p = mul_add(p, z, splat(-3.3306572e-4f));
    p = mul_add(p, z, splat(1.9498533e-2f));
    p = mul_add(p, z, splat(-1.0290459e-1f));
    p = mul_add(p, z, splat(-6.365981e-1f));
    p = mul_add(p, z, splat(-1.1283803f));
    const vf tail = z > 5.5f ? vf{} : exp(z * p) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace simd
