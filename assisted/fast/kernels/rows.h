/* Products with weights where the model has them, [outputs, inputs] each: rows are read in the order of memory. */

#pragma once

#include "outputs.h"

/* ---- Inputs ---- */

/* STREAMS: of rows that a thread reads at a time, each in the order of memory; ROWS: of each of them for one thread. SOME: columns
   whose sums fit in the registers, a lot. LOTS: for which the same DEPTH weights of each row are read from the first cache; half as
   many of a prompt with more than FAR inputs, which stay in the second cache. With wide vectors, such inputs stay in the first one,
   DEEP of each column. */
enum { STREAMS = 4, ROWS = WIDE == 8 ? 8 : TILE, SOME = WIDE == 16 ? 6 : WIDE == 8 ? 3 : 2 };
enum { LOTS = WIDE == 16 ? 2 : WIDE == 8 ? 4 : 1, DEPTH = WIDE == 8 ? 256 : 1 << 30, FAR = 4096, DEEP = 1024 };

/* SIDE_BY_SIDE: how inputs of a lot's columns lie, group for group. NUMBERS: of a vector. NEAR: bytes of inputs that stay in the first
   cache while rows pass through it. NARROW: the most of their vectors for which rows are read one after the other. */
enum { SIDE_BY_SIDE = WIDE == 16 };
#ifdef DOTS
typedef bf16 input;
enum { NUMBERS = 2 * WIDE, NEAR = 20 << 10, NARROW = 8 };
#else
typedef float input;
enum { NUMBERS = WIDE, NEAR = 16 << 10, NARROW = 4 };
#endif

/* Rows are read one after the other, which memory answers best, if the inputs of a few columns stay in the first cache meanwhile.
   Otherwise each vector of inputs is used for a row of each stream: of two, if there is a single column, for which the processor
   fetches by itself. The sums are the same. */
INLINE int is_alone(const Product *p, int64_t n) {
    enum { VECTORS = sizeof(input) / sizeof(number) };
    return WIDE == 16 && n > 1 && n * VECTORS <= NARROW && n * p->inputs * (int64_t)sizeof(input) <= NEAR;
}

/* How columns are divided into lots, which are computed together: the first `larger` ones have one more than the others. */
typedef struct {
    int64_t count, each, larger;
} Lots;

typedef struct {
    int64_t first, columns;
} Lot;

INLINE Lots lots_of(const Product *p, int64_t n) {
    const int64_t count = is_alone(p, n) ? 1 : (n + SOME - 1) / SOME;
    return (Lots){count, n / count, n % count};
}

INLINE int streams_of(const Lots *all) { return WIDE == 16 && all->count == 1 && all->each == 1 ? 2 : STREAMS; }

INLINE Lot lot_at(const Lots *all, int64_t i) {
    return (Lot){i * all->each + (i < all->larger ? i : all->larger), all->each + (i < all->larger)};
}

INLINE Lot lot_with(const Lots *all, int64_t column) {
    const int64_t of_larger = all->larger * (all->each + 1);
    return lot_at(all, column < of_larger ? column / (all->each + 1) : all->larger + (column - of_larger) / all->each);
}

/* Copies groups [from, to) of the inputs x [n, inputs]. Of bfloat16 that is expanded, numbers at even places come before those at odd
   ones, of each two vectors. */
static void arrange(const Product *p, const number *x, int64_t n, int64_t from, int64_t to, float *scratch) {
    const int64_t groups = p->inputs / GROUP;
    const Lots lots = lots_of(p, n);
    for (int64_t f = from, c = from / groups; f < to; c++) {
        const Lot lot = lot_with(&lots, c);
        for (const int64_t end = to < (c + 1) * groups ? to : (c + 1) * groups; f < end; f++) {
            const int64_t place = SIDE_BY_SIDE ? lot.first * groups + (f - c * groups) * lot.columns + c - lot.first : f;
            input *own = (input *)scratch + place * GROUP;
            if (sizeof(input) == sizeof(number)) {
                memcpy(own, x + f * GROUP, GROUP * sizeof(number));
            } else {
                UNROLLED for (int i = 0; i < GROUP; i += 2 * WIDE) {
                    const words pair = words_of(x + f * GROUP + i), both[2] = {pair << 16, pair & 0xffff0000};
                    memcpy(own + i, both, sizeof both);
                }
            }
        }
    }
}

/* ---- Products ---- */

/* What `weights_at` finds at number i of a row fits the inputs there. */
#ifdef DOTS

INLINE vec weights_at(const bf16 *row, int64_t i) { return wide((const float *)(row + i)); }

INLINE vec plus_products(vec sum, vec one, vec two) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)two); }

#else

INLINE vec weights_at(const number *row, int64_t i) {
#ifdef FLOAT32
    return wide(row + i);
#else
    const words pair = words_of(row + i / (2 * WIDE) * (2 * WIDE));
    return (vec)(i / WIDE % 2 ? pair & 0xffff0000 : pair << 16);
#endif
}

INLINE vec plus_products(vec sum, vec one, vec two) {
#if WIDE == 8 && !defined(__clang__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(one), "xm"(two)); /* otherwise GCC copies sums from register to register */
    return sum;
#else
    return plus_product(sum, one, two);
#endif
}

#endif

/* Whether products with weights in place take about as long as those with packed ones, for a draft's columns. */
#if defined(DOTS) && !defined(TILED)
const int64_t rows_suffice = 2; /* on some processors, see `native.py` */
#else
const int64_t rows_suffice = WIDE == 8;
#endif

/* Sums of a row of each stream with `depth` inputs of a lot's columns, for sums[column][stream]; those of far streams go on from there.
   of_column, of_stream: vectors from one to the next. soon: bytes from a weight to the one that is asked for, or 0. */
INLINE void add_rows(
    vec *sums, int of_column, int of_stream, const number *const *rows, const input *x, int64_t inputs, int64_t depth, int soon, int streams,
    int columns) {
    vec own[STREAMS][MOST];
    UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int c = 0; c < columns; c++) {
        own[s][c] = of_stream > 1 ? sums[c * of_column + s * of_stream] : all(0);
    }
    for (int64_t k = 0; k < depth; k += GROUP) {
        if (soon) UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int i = 0; i < GROUP; i += LINE / (int)sizeof(number))
            __builtin_prefetch((const char *)(rows[s] + k + i) + soon);
        UNROLLED for (int i = 0; i < GROUP; i += NUMBERS) {
            vec one[MOST];
            UNROLLED for (int c = 0; c < columns; c++) {
                const int64_t place = SIDE_BY_SIDE ? k * columns + c * GROUP : c * inputs + k;
                one[c] = wide((const float *)(x + place + i));
            }
            UNROLLED for (int s = 0; s < streams; s++) {
                const vec weight = weights_at(rows[s] + k, i);
                UNROLLED for (int c = 0; c < columns; c++) own[s][c] = plus_products(own[s][c], weight, one[c]);
            }
        }
    }
    UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int c = 0; c < columns; c++) {
        sums[c * of_column + s * of_stream] = own[s][c];
    }
}

#define ROWS_OF(streams, columns)                                                             \
    case columns:                                                                             \
        add_rows(sums, OF_COLUMN, OF_STREAM, rows, x, inputs, depth, SOON, streams, columns); \
        break;

/* The outputs from `at` on that `sums` have, ROWS of each column. residual: added to the rounded result, or NULL. */
static void finish_rows(
    const Product *p, const vec *sums, int of_column, int64_t at, const number *residual, number *y, int64_t columns) {
    for (int64_t c = 0; c < columns; c++) UNROLLED for (int i = 0; i < ROWS; i += WIDE) {
        const int64_t to = c * p->outputs + at + i;
        finish(p, sums_of(sums + c * of_column + i), at + i, residual ? residual + to : NULL, y + to);
    }
}

/* A line keeps the sums of several columns in other places of the cache. */
enum { OF_STREAMS = STREAMS * ROWS + 1, OF_ALONE = ROWS + 1 };

INLINE void add_streams(
    vec *sums, const number *const *rows, const input *x, int64_t inputs, int64_t depth, int streams, int columns) {
    enum { OF_COLUMN = OF_STREAMS, OF_STREAM = ROWS, SOON = WIDE == 8 ? 512 : WIDE == 16 ? 2048 : 0 };
    if (WIDE == 16 && streams < STREAMS) {
        add_rows(sums, OF_COLUMN, OF_STREAM, rows, x, inputs, depth, 0, 2, 1);
        return;
    }
    switch (columns) {
        ROWS_OF(STREAMS, 1) ROWS_OF(STREAMS, 2)
#if WIDE > 4
        ROWS_OF(STREAMS, 3)
#endif
#if WIDE > 8
        ROWS_OF(STREAMS, 4) ROWS_OF(STREAMS, 5) ROWS_OF(STREAMS, 6)
#endif
    }
}

/* ROWS outputs of each stream from output `first` of the first one on, of lots [begin, end). */
static void some_of_streams(
    const Product *p, int64_t first, const input *x, const number *residual, number *y, const Lots *lots, int64_t begin, int64_t end) {
    const int streams = streams_of(lots);
    const int64_t before = lot_at(lots, begin).first, columns = lot_at(lots, end).first - before;
    const int64_t apart = p->outputs / streams, at = before * p->outputs;
    vec sums[LOTS * SOME * OF_STREAMS];
    memset(sums, 0, columns * OF_STREAMS * sizeof *sums);
    const int64_t deep = WIDE == 16 && columns > MOST && p->inputs > FAR ? DEEP : p->inputs;
    for (int64_t top = 0; top < p->inputs; top += deep) for (int i = 0; i < ROWS; i++) {
        const int64_t bottom = p->inputs - top < deep ? p->inputs : top + deep;
        for (int64_t from = top; from < bottom; from += DEPTH) {
            const number *rows[STREAMS];
            for (int s = 0; s < streams; s++) rows[s] = p->rows[first + i + s * apart] + from;
            const int64_t depth = bottom - from < DEPTH ? bottom - from : DEPTH;
            for (int64_t j = begin; j < end; j++) {
                const Lot lot = lot_at(lots, j);
                vec *of_lot = sums + (lot.first - before) * OF_STREAMS + i;
                const input *own = x + lot.first * p->inputs + (SIDE_BY_SIDE ? from * lot.columns : from);
                add_streams(of_lot, rows, own, p->inputs, depth, streams, (int)lot.columns);
            }
        }
    }
    for (int s = 0; s < streams; s++)
        finish_rows(p, sums + s * ROWS, OF_STREAMS, first + s * apart, residual ? residual + at : NULL, y + at, columns);
}

#if WIDE == 16

/* One row; of many columns two, for which each vector of inputs is used. Returns how many. */
static int add_alone(vec *sums, const number *const *rows, const input *x, int64_t inputs, int64_t columns) {
    enum { OF_COLUMN = OF_ALONE, OF_STREAM = 1, SOON = 8192 };
    const int64_t depth = inputs;
    switch (columns) {
        ROWS_OF(1, 2) ROWS_OF(1, 3) ROWS_OF(1, 4) ROWS_OF(1, 5) ROWS_OF(1, 6) ROWS_OF(1, 7) ROWS_OF(2, 8)
    }
    return columns < 8 ? 1 : 2;
}

/* As many outputs, of rows that follow one another. */
static void some_alone(const Product *p, int64_t first, const input *x, const number *residual, number *y, int64_t n) {
    for (int64_t at = first; at < first + STREAMS * ROWS; at += ROWS) {
        vec sums[MOST * OF_ALONE];
        for (int i = 0; i < ROWS;) i += add_alone(sums + i, p->rows + at + i, x, p->inputs, n);
        finish_rows(p, sums, OF_ALONE, at, residual, y, n);
    }
}

#endif
