/* Activations of an MLP. */

#pragma once

#include "abi.h"

/* In the order of `native.ACTIVATIONS`. */
enum { SILU, GELU_TANH, GELU, RELU2, XIELU };

/* xIELU is several operations in transformers, each of which rounds. */
INLINE vec xielu(vec x, const Layer *l) {
    const vec least = all(l->xielu_epsilon), straight = rounded(all(l->xielu_beta) * x);
    const vec square = rounded(rounded(all(l->xielu_above) * x) * x);
    const vec bent = rounded(rounded(exponential_less_one(chosen(x < least, x, least))) - x);
    return chosen(x > all(0), square, rounded(bent * all(l->xielu_below))) + straight;
}

INLINE vec activated(vec x, const Layer *l) {
    const vec positive = greater(x, all(0));
    switch (l->activation) {
        case SILU: return silu(x);
        case GELU_TANH: return gated_by(x, all(1.59576912f) * plus_product(x, all(0.044715f) * x * x, x));
        case GELU: return all(0.5f) * x * (all(1) + error_of(x * all(0.707106781f)));
        case XIELU: return xielu(x, l);
        default: return positive * positive;
    }
}
