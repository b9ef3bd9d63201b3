/* Norms, rotary embedding and whole layers. */

#pragma once

#include "activations.h"
#include "attention.h"
#include "delta.h"
#include "product.h"

/* The norm of a vector. kind: of the norm. */
INLINE void norm_of_kind(const Norm *m, const number *x, const number *weight, number *y, int64_t kind) {
    const int64_t size = m->size;
    vec mean = all(0), squares = all(0);
    if (kind & CENTERS) {
        for (int64_t i = 0; i < size; i += WIDE) mean += load(x + i);
        mean = all(sum_of(mean) / (float)size);
    }
    for (int64_t i = 0; i < size; i += WIDE) {
        const vec v = kind & CENTERS ? load(x + i) - mean : load(x + i);
        squares = plus_product(squares, v, v);
    }
    const vec scale = all(1.0f / sqrtf(sum_of(squares) / (float)size + m->epsilon));
    for (int64_t i = 0; i < size; i += WIDE) {
        vec v = (kind & CENTERS ? load(x + i) - mean : load(x + i)) * scale;
        if (kind & ROUNDS) v = rounded(v);
        if (weight) {
            vec by = load(weight + i);
            if (kind & ADDS_ONE) by += all(1);
            v *= kind & ROUNDS_WEIGHT ? rounded(by) : by;
        }
        if (m->bias) v += load(m->bias + i);
        store(y + i, v);
    }
}

/* The same of head h. */
static void norm_head(const Norm *m, const number *x, int64_t h, number *y) {
    const number *weight = m->weight ? m->weight + h * m->apart : NULL;
    if (m->kind == (NORMS | ROUNDS) && !m->bias && weight)
        norm_of_kind(&(Norm){.size = m->size, .epsilon = m->epsilon}, x, weight, y, NORMS | ROUNDS);
    else
        norm_of_kind(m, x, weight, y, m->kind);
}

/* Llama's. */
static void norm(const number *x, const number *weight, int64_t size, float epsilon, number *y) {
    norm_head(&(Norm){.weight = weight, .size = size, .kind = NORMS | ROUNDS, .epsilon = epsilon}, x, 0, y);
}

/* The norms of n vectors. */
void norms(const Norm *m, const number *x, int64_t n, number *y) {
    for (int64_t c = 0; c < n; c++) norm_head(m, x + c * m->size, 0, y + c * m->size);
}

/* Turns a head by the angles of its position. sin is negative in the first half, or first in each pair. */
INLINE void turn(const Layer *l, number *head, const number *cos, const number *sin) {
    const int64_t turned = l->turned, half = turned / 2, end = (turned + WIDE - 1) / WIDE * WIDE;
    number beside[WIDEST] = {0}; /* where numbers do not turn, cos is 1 and sin 0 */
    if (l->turning & PAIRS) {
        for (int64_t i = 0; i < turned; i += 2) beside[i] = head[i + 1], beside[i + 1] = head[i];
    } else {
        memcpy(beside, head + half, half * sizeof(number));
        memcpy(beside + half, head, half * sizeof(number));
    }
    for (int64_t i = 0; i < end; i += WIDE) {
        const vec one = load(head + i), two = load(beside + i);
        if (l->turning & IN_FLOATS)
            store(head + i, one * wide((const float *)cos + i) + two * wide((const float *)sin + i));
        else
            store(head + i, rounded(one * load(cos + i)) + rounded(two * load(sin + i)));
    }
}

/* 0 if all columns are written to slots that are there; else minus one less the first column that is not. */
static int64_t without_slot(const Pass *s, int64_t capacity) {
    for (int64_t c = 0; s->places && c < s->rows * s->width; c++)
        if (s->places[c] < s->first || s->places[c] >= capacity) return -c - 1;
    return 0;
}

/* Norms a column's queries and keys, each head by itself or all at once. */
static void norm_heads(const Layer *l, number *heads) {
    for (int of_keys = 0; of_keys < 2; of_keys++) {
        const Norm *m = of_keys ? &l->key_norm : &l->query_norm;
        const int64_t count = of_keys ? l->key_heads : l->query_heads;
        if (m->kind)
            for (int64_t h = 0; h * m->size < count * l->head_size; h++) norm_head(m, heads + h * m->size, h, heads + h * m->size);
        heads += count * l->head_size;
    }
}

/* Puts the gates of a column's heads apart: queries, keys and values are left one after the other. */
static void take_gates(const Layer *l, number *heads, number *gates) {
    const int64_t size = l->head_size, of_gates = l->query_heads * size;
    for (int64_t h = 0; h < l->query_heads; h++) {
        memcpy(gates + h * size, heads + (2 * h + 1) * size, size * sizeof(number));
        memmove(heads + h * size, heads + 2 * h * size, size * sizeof(number));
    }
    memmove(heads + of_gates, heads + 2 * of_gates, 2 * l->key_heads * size * sizeof(number));
}

/* Norms and turns a column's queries and keys, and writes its keys and values to its slot, [rows, key heads, capacity, size]. */
static void finish_heads(
    const Layer *l, const Pass *s, int64_t c, number *heads, number *gates, number *keys, number *values, int64_t capacity) {
    const int64_t size = l->head_size, turned = l->query_heads + l->key_heads;
    if (l->has_gates) take_gates(l, heads, gates);
    const int64_t at = (s->angles == 1 ? c % s->width : c) * size * (l->turning & IN_FLOATS ? sizeof(float) / sizeof(number) : 1);
    if (!l->norms_turned) norm_heads(l, heads);
    for (int64_t h = 0; l->turned && h < turned; h++) turn(l, heads + h * size, s->cos + at, s->sin + at);
    if (l->norms_turned) norm_heads(l, heads);
    for (int64_t h = 0; h < l->key_heads; h++) {
        const int64_t to = ((c / s->width * l->key_heads + h) * capacity + s->places[c]) * size;
        memcpy(keys + to, heads + (l->query_heads + h) * size, size * sizeof(number));
        memcpy(values + to, heads + (turned + h) * size, size * sizeof(number));
    }
}

/* What a product reads: x [n, size], normed into `normed` if there is a norm. Fills `scratch`. Within a parallel region. */
static const number *read_normed(const Norm *m, const Product *p, const number *x, int64_t n, number *normed, float *scratch) {
    const number *given = m->kind ? normed : x;
    const int64_t groups = p->inputs / GROUP;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        if (m->kind) norm_head(m, x + c * p->inputs, 0, normed + c * p->inputs);
        groups_of(p, given, n, c * groups, (c + 1) * groups, scratch);
    }
    return given;
}

/* y [n, size] = residual plus the product, which may be normed before. Otherwise as `product`. */
static void add_product(
    const Product *p, const Norm *after, const number *x, int64_t n, const number *residual, number *y, float *scratch, float *own) {
    product(p, x, n, after->kind ? NULL : residual, y, scratch, own);
    if (!after->kind) return;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        number *to = y + c * after->size;
        norm_head(after, to, 0, to);
        for (int64_t i = 0; i < after->size; i += WIDE) store(to + i, load(residual + c * after->size + i) + load(to + i));
    }
}

/* The columns [from, from + n) of a layer's output [columns, hidden] for hidden [columns, hidden], within a parallel region.
   beside: what the mixer's first product reads; NULL for the norm of hidden. stores: of attention, keys and values [rows, key heads,
   capacity, head size]; of the delta rule, the states before, which with `notes` it takes as `mix_columns`. out: NULL if only keys
   and values are needed. */
static void layer(
    const Layer *l, const Pass *s, const number *hidden, const number *beside, void *const *stores, void *const *notes, int64_t capacity,
    number *out, int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    number *normed = s->buffer, *heads = normed + n * l->hidden, *seen = heads + n * l->heads.outputs;
    number *middle = seen + n * l->output.inputs, *again = middle + n * l->hidden;
    number *wide = again + n * l->hidden, *narrow = wide + n * 2 * l->inner, *gates = narrow + n * l->inner;
    hidden += from * l->hidden;
    const number *read = beside ? beside + from * l->heads.inputs : NULL;
    if (!beside) read = read_normed(&l->before_attention, &l->heads, hidden, n, normed, s->scratch);
    product(&l->heads, read, n, NULL, heads, s->scratch, beside ? own : NULL);
    if (l->delta.heads) {
        mix_columns(
            &l->delta, s->width, s->parents, heads, l->heads.outputs, stores[0], stores[1], notes, seen, l->output.inputs, from, n);
    } else {
        const int64_t of_gates = l->output.inputs;
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++)
            finish_heads(l, s, from + c, heads + c * l->heads.outputs, gates + c * of_gates, stores[0], stores[1], capacity);
        if (!out) return;
        attend_all(l, s, heads, stores[0], stores[1], capacity, seen, from, n);
        if (l->has_gates) {
#pragma omp for schedule(static)
            for (int64_t at = 0; at < n * of_gates / GROUP; at++)
                UNROLLED for (int i = 0; i < GROUP; i += WIDE) {
                    number *to = seen + at * GROUP + i;
                    store(to, load(to) * rounded(gated_by(all(1), load(gates + at * GROUP + i))));
                }
        }
    }
    out += from * l->hidden;
    if (!l->down.outputs) middle = out;
    add_product(&l->output, &l->after_attention, seen, n, hidden, middle, s->scratch, own);
    if (!l->down.outputs) return;
    read = read_normed(&l->before_mlp, &l->gate_up, l->beside ? read : middle, n, again, s->scratch);
    product(&l->gate_up, read, n, NULL, wide, s->scratch, NULL);
#pragma omp for schedule(static)
    for (int64_t g = 0; g < n * l->inner / GROUP; g++) {
        const int64_t c = GROUP * g / l->inner, at = GROUP * g % l->inner;
        const number *gate = wide + c * l->gate_up.outputs + at;
        UNROLLED for (int i = 0; i < GROUP; i += WIDE) {
            vec made = activated(load(gate + i), l);
            if (l->is_gated) made = rounded(made) * load(gate + l->inner + i);
            store(narrow + g * GROUP + i, made);
        }
        groups_of(&l->down, narrow, n, g, g + 1, s->scratch);
    }
    add_product(&l->down, &l->after_mlp, narrow, n, middle, out, s->scratch, NULL);
}

/* The layers of a model, one after the other, each over some columns at a time, whose numbers stay in the cache. passes: the same one
   for each layer, which differ in angles and in the slots that columns see. stores: two of each layer. notes: four of each, of
   attention not read, with which all columns are computed at once; NULL for texts. out [count, columns, hidden]: the output of each;
   NULL, of a single layer, if only keys and values are needed.
   end: NULL if there are no logits [columns, outputs]. Returns what `without_slot` does, and computes nothing unless that is 0. */
int64_t layers(
    const Layer *const *each, int64_t count, const Pass *const *passes, const number *hidden, const number *beside,
    void *const *stores, void *const *notes, int64_t capacity, number *out, const End *end, number *logits) {
    const Pass *s = passes[0];
    const int64_t columns = s->rows * s->width, size = each[0]->hidden, wrong = without_slot(s, capacity);
    if (wrong) return wrong;
#pragma omp parallel num_threads(s->threads)
    {
        for (int64_t i = 0; i < count; i++) {
            number *to = out ? out + i * columns * size : NULL;
            for (int64_t from = 0; from < columns; from += s->at_once) {
                const int64_t n = columns - from < s->at_once ? columns - from : s->at_once;
                layer(
                    each[i], passes[i], i ? to - columns * size : hidden, i ? NULL : beside, stores + 2 * i, notes ? notes + 4 * i : NULL,
                    capacity, to, from, n);
            }
        }
        for (int64_t from = 0; end && from < columns; from += s->at_once) {
            const int64_t n = columns - from < s->at_once ? columns - from : s->at_once;
            const number *last = out + (count - 1) * columns * size + from * size;
            last = read_normed(&end->norm, &end->output, last, n, s->buffer, s->scratch);
            product(&end->output, last, n, NULL, logits + from * end->output.outputs, s->scratch, NULL);
        }
    }
    return 0;
}
