/* What becomes of the sums of a product. */

#pragma once

#include "abi.h"

/* The outputs of a column from `at` on, as many as a vector has. residual: added to the rounded result, or NULL. */
INLINE void finish(const Product *p, vec sum, int64_t at, const number *residual, number *y) {
    if (p->bits == 8) sum *= wide(p->scales + at);
    if (p->bias) sum += wide(p->bias + at);
    if (residual) {
        sum = rounded(sum);
        if (p->multiplier != 1) sum = rounded(sum * all(p->multiplier));
        sum += load(residual);
    }
    store(y, sum);
}
