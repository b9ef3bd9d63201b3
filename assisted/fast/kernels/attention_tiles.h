/* Attention with the matrix tiles of AMX. */

#pragma once

#include "tiles.h"

/* Up to sixteen queries of a key head, each of a column and a query head. They are the lanes of a vector: scores lie by slots, so
   softmax needs no sums across lanes, and a query has the same bits whatever stands beside it. */
typedef struct {
    const bf16 *queries[TILE];
    bf16 *seen[TILE];
    int32_t counts[TILE];        /* of slots that a query sees */
    const int64_t *slots[TILE];  /* these slots, in order; NULL for the first ones */
    float sinks[TILE];           /* of their heads, if a layer has them */
    int lanes, of_column;        /* lanes of a column, which lie together */
    int64_t count, shared;       /* the most slots; up to where all columns see the first ones */
} Queries;

enum { KEYS = 32 }; /* slots of a step */

/* Whether slots [j, end) of a list, which ascends, lie one after the other. */
INLINE int lie_together(const int64_t *slots, int64_t j, int64_t end) { return !slots || slots[end - 1] - slots[j] == end - 1 - j; }

/* Where `KEYS` keys or values from slot j on lie, one after the other; some are copied, and zeros stand for what is not there. */
INLINE const bf16 *some_slots(const bf16 *from, const int64_t *slots, int64_t j, int64_t count, int64_t size, bf16 *copied) {
    if (j + KEYS <= count && lie_together(slots, j, j + KEYS)) return from + (slots ? slots[j] : j) * size;
    for (int64_t i = 0; i < KEYS; i++) {
        if (j + i < count)
            memcpy(copied + i * size, from + (slots ? slots[j + i] : j + i) * size, size * sizeof(bf16));
        else
            memset(copied + i * size, 0, size * sizeof(bf16));
    }
    __asm__ volatile("" ::: "memory");
    return copied;
}

/* scores [KEYS][16]: of queries [size / 32][16 pairs][16 lanes][2] with keys that lie one after the other. */
INLINE void score_some(const bf16 *queries, const bf16 *keys, int64_t size, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < size; k += 32) {
        _tile_loadd(6, queries + k * TILE, LINE);
        _tile_loadd(4, keys + k, size * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys + TILE * size + k, size * sizeof(bf16));
        _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, scores, LINE);
    _tile_stored(1, scores + TILE * TILE, LINE);
}

INLINE __mmask16 lanes_of(const Queries *q, int lane) { return (__mmask16)(((1 << q->of_column) - 1) << lane); }

/* scores [count, rounded up to KEYS][16]. Slots that columns do not share are scored for each column by itself. */
INLINE void score(const Queries *q, const bf16 *queries, const bf16 *keys, int64_t size, float *scores, bf16 *copied) {
    _Alignas(LINE) float own[KEYS][TILE];
    int64_t j = 0;
    for (; j < q->shared; j += KEYS)
        score_some(queries, some_slots(keys, NULL, j, q->count, size, copied), size, scores + j * TILE);
    for (; j < q->count; j += KEYS)
        for (int lane = 0; lane < q->lanes; lane += q->of_column) {
            if (j >= q->counts[lane]) continue;
            score_some(queries, some_slots(keys, q->slots[lane], j, q->counts[lane], size, copied), size, own[0]);
            for (int64_t i = 0; i < KEYS; i++)
                _mm512_mask_store_ps(scores + (j + i) * TILE, lanes_of(q, lane), _mm512_load_ps(own[i]));
        }
}

/* Transposes sixteen vectors of sixteen numbers. */
INLINE void transpose(const int32_t *from, int32_t *to) {
    __m512i a[16], b[16];
    UNROLLED for (int i = 0; i < 16; i++) a[i] = _mm512_load_si512(from + i * 16);
    UNROLLED for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4) UNROLLED for (int k = 0; k < 2; k++) {
        a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
        a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
    }
    /* a[4 i + k]: of vectors 4 i to 4 i + 3 the numbers k, k + 4, k + 8, k + 12 */
    UNROLLED for (int k = 0; k < 4; k++) {
        const __m512i one = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88), two = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
        const __m512i three = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
        const __m512i four = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
        _mm512_store_si512(to + k * 16, _mm512_shuffle_i32x4(one, three, 0x88));
        _mm512_store_si512(to + (4 + k) * 16, _mm512_shuffle_i32x4(two, four, 0x88));
        _mm512_store_si512(to + (8 + k) * 16, _mm512_shuffle_i32x4(one, three, 0xdd));
        _mm512_store_si512(to + (12 + k) * 16, _mm512_shuffle_i32x4(two, four, 0xdd));
    }
}

/* The softmax of scores times its divisor, in bfloat16, in their place: [16 lanes][32 slots] for each `KEYS` slots. Returns one over
   the divisors. */
INLINE __m512 weights_in_tiles(const Layer *l, const Queries *q, float *scores) {
    const int64_t count = q->count;
    const __m512i counts = _mm512_loadu_si512(q->counts);
    const int32_t least = _mm512_reduce_min_epi32(counts);
    const __m512 sinks = _mm512_loadu_ps(q->sinks);
    const int has_sinks = l->sinks != NULL;
    __m512 most = has_sinks ? sinks : _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const __mmask16 seen = j < least ? 0xffff : _mm512_cmpgt_epi32_mask(counts, _mm512_set1_epi32((int32_t)j));
        const __m512 own = (__m512)scored(l, (vec)_mm512_load_ps(scores + j * TILE));
        _mm512_store_ps(scores + j * TILE, own);
        most = _mm512_mask_max_ps(most, seen, most, own);
    }
    static const int16_t in_pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_loadu_si512(in_pairs);
    for (int64_t j = 0; j < count; j += KEYS) {
        _Alignas(LINE) int32_t pairs[TILE * TILE];
        for (int64_t i = 0; i < KEYS; i += 2) {
            __m512 found[2];
            UNROLLED for (int k = 0; k < 2; k++) {
                const int64_t at = j + i + k;
                const __mmask16 seen = at < least ? 0xffff : _mm512_cmpgt_epi32_mask(counts, _mm512_set1_epi32((int32_t)at));
                const __m512 own = _mm512_load_ps(scores + at * TILE);
                found[k] = _mm512_maskz_mov_ps(seen, (__m512)exponential(below((vec)own, (vec)most, has_sinks)));
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(found[1], found[0]);
            const __m512i pair = _mm512_permutexvar_epi16(order, both);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000))));
            _mm512_store_si512(pairs + i / 2 * TILE, pair);
        }
        transpose(pairs, (int32_t *)(scores + j * TILE));
    }
    if (has_sinks) sum = _mm512_add_ps(sum, (__m512)rounded(exponential(below((vec)sinks, (vec)most, 1))));
    __asm__ volatile("" ::: "memory");
    return _mm512_maskz_div_ps(_mm512_cmpgt_epi32_mask(counts, _mm512_setzero_si512()), _mm512_set1_ps(1), sum);
}

/* Adds to the sums of 32 * parts numbers those of `KEYS` values, which are interleaved for that by twos, see `mean`. */
INLINE void add_values(const void *weights, const bf16 *values, int64_t size, int parts) {
    _Alignas(LINE) bf16 pairs[2 * 2][TILE][32];
    for (int64_t i = 0; i < KEYS / 2; i++) UNROLLED for (int k = 0; k < parts; k++) {
        const __m512i a = _mm512_loadu_si512(values + 2 * i * size + 32 * k);
        const __m512i b = _mm512_loadu_si512(values + (2 * i + 1) * size + 32 * k);
        _mm512_store_si512(pairs[2 * k][i], _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(pairs[2 * k + 1][i], _mm512_unpackhi_epi16(a, b));
    }
    __asm__ volatile("" ::: "memory");
    _tile_loadd(4, weights, LINE);
    _tile_loadd(6, pairs[0], LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pairs[1], LINE);
    _tile_dpbf16ps(1, 4, 7);
    if (parts > 1) {
        _tile_loadd(6, pairs[2], LINE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, pairs[3], LINE);
        _tile_dpbf16ps(3, 4, 7);
    }
    __asm__ volatile("" ::: "memory"); /* before `pairs` is written again */
}

/* 32 * parts numbers of each query's mean of values from number `at` on. */
INLINE void mean_in_tiles(
    const Queries *q, const float *weights, const float *shares, const bf16 *values, int64_t size, int64_t at, int parts,
    bf16 *copied) {
    _Alignas(LINE) float sums[2 * 2][TILE][TILE];
    begin_sums(2);
    int64_t j = 0;
    for (; j < q->shared; j += KEYS)
        add_values(weights + j * TILE, some_slots(values, NULL, j, q->count, size, copied) + at, size, parts);
    for (; j < q->count; j += KEYS)
        for (int lane = 0; lane < q->lanes; lane += q->of_column) {
            if (j >= q->counts[lane]) continue;
            _Alignas(LINE) float own[TILE][TILE] = {{0}};
            memcpy(own[lane], weights + (j + lane) * TILE, q->of_column * LINE);
            add_values(own, some_slots(values, q->slots[lane], j, q->counts[lane], size, copied) + at, size, parts);
        }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
    for (int lane = 0; lane < q->lanes; lane++)
        for (int k = 0; k < parts; k++)
            store_in_order(
                q->seen[lane] + at + 32 * k, _mm512_load_ps(sums[2 * k][lane]), _mm512_load_ps(sums[2 * k + 1][lane]),
                shares[lane]);
}

/* Attention of queries. scratch: 16 numbers for each slot, rounded up to `KEYS`. */
static void attend_in_tiles(
    const Layer *l, const Queries *q, const bf16 *keys, const bf16 *values, float *scratch) {
    const int64_t size = l->head_size;
    _Alignas(LINE) int32_t queries[WIDEST / 2 * TILE];
    _Alignas(LINE) bf16 copied[KEYS * WIDEST];
    _Alignas(LINE) float shares[TILE];
    memset(queries, 0, size / 2 * TILE * sizeof(int32_t));
    for (int lane = 0; lane < q->lanes; lane++)
        for (int64_t i = 0; i < size / 2; i++) memcpy(queries + i * TILE + lane, q->queries[lane] + 2 * i, sizeof(int32_t));
    __asm__ volatile("" ::: "memory");
    score(q, (const bf16 *)queries, keys, size, scratch, copied);
    _mm512_store_ps(shares, weights_in_tiles(l, q, scratch));
    for (int64_t at = 0; at < size; at += 64)
        mean_in_tiles(q, scratch, shares, values, size, at, size - at < 64 ? 1 : 2, copied);
}

/* How many slots a column sees. */
INLINE int64_t seen_by(const Pass *s, int64_t c) {
    return s->slots ? s->starts[c + 1] - s->starts[c] : s->places[c] - s->first + 1;
}

/* How many of them are the first ones. */
INLINE int64_t first_of(const Pass *s, int64_t c) {
    int64_t least = 0, most = seen_by(s, c);
    while (s->slots && least < most) {
        const int64_t middle = (least + most + 1) / 2;
        if (s->slots[s->starts[c] + middle - 1] == middle - 1)
            least = middle;
        else
            most = middle - 1;
    }
    return most;
}

/* Attention of n columns from `from` on, within a parallel region. Columns of a row stand together. */
static void attend_all(
    const Layer *l, const Pass *s, const bf16 *heads, const bf16 *keys, const bf16 *values, int64_t capacity, bf16 *seen,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    own += (LINE - (uintptr_t)own % LINE) % LINE / sizeof(float);
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, together = group < TILE ? TILE / group : 1;
    int64_t begin[n + 1], blocks = 0;
    for (int64_t c = 0; c < n; c++)
        if (!blocks || c - begin[blocks - 1] == together || (from + c) % s->width == 0) begin[blocks++] = c;
    begin[blocks] = n;
    configure(TILE, 0);
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < blocks * l->key_heads; i++) { /* in turn, because a prompt's columns see more and more slots */
        const int64_t b = i / l->key_heads, h = i % l->key_heads, at = from + begin[b], end = from + begin[b + 1];
        const int64_t of = ((at / s->width * l->key_heads + h) * capacity + s->first) * size;
        int64_t count = 0, shared = INT64_MAX;
        for (int64_t c = at; c < end; c++) {
            const int64_t own_count = seen_by(s, c), firsts = first_of(s, c);
            if (own_count > count) count = own_count;
            if (firsts < own_count && firsts < shared) shared = firsts;
        }
        shared = shared < count ? shared / KEYS * KEYS : count;
        for (int64_t first = 0; first < group; first += TILE) {
            Queries q = {.count = count, .shared = shared, .of_column = (int)(group - first < TILE ? group - first : TILE)};
            for (int i = 0; i < TILE; i++) q.counts[i] = (int32_t)count;
            for (int64_t c = at; c < end; c++)
                for (int64_t k = first; k < first + q.of_column; k++) {
                    q.queries[q.lanes] = heads + (c - from) * l->heads.outputs + (h * group + k) * size;
                    q.seen[q.lanes] = seen + (c - from) * l->output.inputs + (h * group + k) * size;
                    if (l->sinks) q.sinks[q.lanes] = number_of(l->sinks[h * group + k]);
                    q.slots[q.lanes] = s->slots ? s->slots + s->starts[c] : NULL;
                    q.counts[q.lanes++] = (int32_t)seen_by(s, c);
                }
            attend_in_tiles(l, &q, keys + of, values + of, own);
        }
    }
    _tile_release();
}
