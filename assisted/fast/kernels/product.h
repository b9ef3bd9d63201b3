/* Products of any weights, by one thread or several. */

#pragma once

#include "packed.h"
#include "rows.h"
#ifdef TILED
#include "tiles.h"
#endif

/* y [n, outputs] = x [n, inputs] times the weights, within a parallel region. scratch: n * inputs / 32 * most_of_group numbers,
   shared by all threads; own: a thread's own, as many, or NULL if `scratch` has been filled. For few columns, computing the same in
   each thread takes less time than waiting. */
static void product(const Product *p, const number *x, int64_t n, const number *residual, number *y, float *scratch, float *own) {
    const int64_t groups = p->inputs / GROUP, numbers = of_group(p);
    if (own && n > FEW && numbers) {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++) groups_of(p, x, n, c * groups, (c + 1) * groups, scratch);
    } else if (own) {
        groups_of(p, x, n, 0, n * groups, scratch = own);
    }
#ifdef TILED
    if (!p->rows && (p->input_bits == 16 || (p->bits == 4 && n > ALONE))) {
        for (int64_t c = 0; c < n; c += BLOCKS * TILE) {
            const int64_t to = c * p->outputs, columns = n - c < BLOCKS * TILE ? n - c : BLOCKS * TILE;
            configure(columns < TILE ? (int)columns : TILE, p->input_bits == 8);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < p->outputs / (TILE * TILES); t++)
                blocks_of(
                    p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * numbers, residual ? residual + to : NULL, y + to,
                    columns);
            _tile_release();
        }
        return;
    }
#endif
    if (p->rows) {
        const Lots lots = lots_of(p, n);
        const int64_t rows = streams_of(&lots) * ROWS;
        const int64_t at_once = WIDE == 8 && lots.count > LOTS && p->inputs > FAR ? LOTS / 2 : LOTS;
        const input *given = numbers ? (const input *)scratch : (const input *)x;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p->outputs / rows; t++) {
#if WIDE == 16
            if (is_alone(p, n)) {
                some_alone(p, t * STREAMS * ROWS, given, residual, y, n);
                continue;
            }
#endif
            for (int64_t i = 0; i < lots.count; i += at_once) {
                const int64_t end = lots.count - i < at_once ? lots.count : i + at_once;
                some_of_streams(p, t * ROWS, given, residual, y, &lots, i, end);
            }
        }
        return;
    }
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p->outputs / (TILES * TILE); t++)
        for (int64_t c = 0, left = (n + MOST - 1) / MOST; left; left--) {
            const int64_t to = c * p->outputs, columns = (n - c + left - 1) / left; /* about as many each time */
            two_tiles(
                p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * numbers, residual ? residual + to : NULL, y + to,
                (int)columns);
            c += columns;
        }
}

/* The same on its own. scratch: as many for each thread. */
void multiply(const Product *p, const number *x, int64_t n, number *y, float *scratch, int threads) {
    const int64_t of_thread = n * (p->inputs / GROUP) * most_of_group;
#pragma omp parallel num_threads(threads)
    product(p, x, n, NULL, y, scratch, scratch + omp_get_thread_num() * of_thread);
}
