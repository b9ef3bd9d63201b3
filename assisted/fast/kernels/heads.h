/* Heads of one layer, of EAGLE-3 (2503.01840) and MTP (2412.19437): their steps, and the token trees that grow from them (2406.16858).
   One row. */

#pragma once

#include "layer.h"

/* The states [n, hidden] of features [n, fuse.inputs]. room: n * fuse.inputs. scratch: as `multiply`. */
void fuse_features(
    const Head *h, const number *features, int64_t n, number *room, number *out, float *scratch, int threads) {
    const int64_t size = h->fuse.inputs / h->taps;
    for (int64_t part = 0; h->tap_norms && part < n * h->taps; part++)
        norm(features + part * size, h->tap_norms + part % h->taps * size, size, h->tap_epsilon, room + part * size);
    multiply(&h->fuse, h->tap_norms ? room : features, n, out, scratch, threads);
}

/* 0 if all ids have an embedding; else one more than the first column whose id has none. */
static int64_t without_embedding(const int64_t *ids, int64_t columns, int64_t rows) {
    for (int64_t c = 0; c < columns; c++)
        if (ids[c] < 0 || ids[c] >= rows) return c + 1;
    return 0;
}

/* The norm of a vector, or the vector itself if there is none. */
static void norm_if(const Norm *m, const number *x, int64_t size, number *y) {
    if (m->kind)
        norm_head(m, x, 0, y);
    else if (x != y)
        memcpy(y, x, size * sizeof(number));
}

/* The states [width, hidden] after columns of tokens ids and states. Those, and out, may not overlap. room: 3 * width * hidden.
   Returns what `without_embedding` does, or `without_slot`, and computes nothing unless both are 0. */
int64_t step_of_head(
    const Head *h, const Pass *s, const int64_t *ids, const number *states, number *keys, number *values, int64_t capacity,
    number *room, number *out) {
    const Layer *l = &h->layer;
    const int64_t size = l->hidden, n = s->width;
    number *beside = room, *residual = room + 2 * n * size;
    void *const stores[2] = {keys, values};
    const int64_t wrong = without_embedding(ids, n, h->rows), beyond = without_slot(s, capacity);
    if (wrong || beyond) return wrong ? wrong : beyond;
#pragma omp parallel num_threads(s->threads)
    {
        float *own = s->scratch + omp_get_thread_num() * s->of_thread;
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++) {
            number *token = beside + 2 * c * size, *state = token + size;
            norm_if(&h->token_norm, h->embeddings + ids[c] * size, size, token);
            norm_if(&h->state_norm, states + c * size, size, state);
            memcpy(residual + c * size, h->normed_residual ? state : states + c * size, size * sizeof(number));
        }
        if (h->join.outputs) product(&h->join, beside, n, NULL, residual, s->scratch, own);
        layer(l, s, residual, h->join.outputs ? NULL : beside, stores, NULL, capacity, out, 0, n);
        if (h->normed_output) {
#pragma omp for schedule(static)
            for (int64_t c = 0; c < n; c++) norm_if(&h->end_norm, out + c * size, size, out + c * size);
        }
    }
    return 0;
}

/* Logits [n, outputs] after states. room: n * hidden. scratch: as `multiply`. */
void logits_of_head(
    const Head *h, const number *states, int64_t n, number *room, number *logits, float *scratch, int threads) {
    const int64_t size = h->layer.hidden;
    if (!h->normed_output)
        for (int64_t c = 0; c < n; c++) norm_if(&h->end_norm, states + c * size, size, room + c * size);
    multiply(&h->output, h->normed_output ? states : room, n, logits, scratch, threads);
}

/* The rate of a candidate; 0 where its probability is 0 or not a number. */
static double rate_of(const Tree *t, double probability, int64_t rank) {
    if (!(probability > 0)) return 0;
    int64_t bin = 0;
    while (bin + 1 < t->bins && probability >= t->edges[bin]) bin++;
    const int64_t cell = bin + t->bins * (rank < t->ranks ? rank : t->ranks - 1);
    const double found = t->base[cell] + t->slope[cell] * probability;
    return found < 1 ? found : 1;
}

/* The `count` most probable of the logits, best first: which, and their probabilities, which are not numbers if a logit is not. */
static void most_probable(const number *logits, int64_t numbers, int64_t count, int64_t *which, float *sure) {
    int64_t held = 0;
    float part[WIDE], least = -INFINITY;
    for (int64_t i = 0; i < numbers; i += WIDE) {
        const int width = numbers - i < WIDE ? (int)(numbers - i) : WIDE;
        if (width == WIDE && held == count && most_of(load(logits + i)) <= least) continue;
        for (int k = 0; k < width; k++) part[k] = number_of(logits[i + k]);
        for (int k = 0; k < width; k++) {
            if (held == count && !(part[k] > least)) continue;
            int64_t at = held < count ? held++ : count - 1;
            for (; at > 0 && part[k] > sure[at - 1]; at--) sure[at] = sure[at - 1], which[at] = which[at - 1];
            sure[at] = part[k], which[at] = i + k;
            least = sure[held - 1];
        }
    }
    const float most = sure[0];
    vec sums = all(0);
    ints wrong = {0};
    int64_t i = 0;
    for (; i + WIDE <= numbers; i += WIDE) {
        const vec below = load(logits + i) - all(most);
        wrong |= below != below;
        sums += exponential(below);
    }
    float sum = sum_of(sums);
    for (int k = 0; k < WIDE; k++) sum = wrong[k] ? NAN : sum;
    for (; i < numbers; i++) sum += expf(number_of(logits[i]) - most);
    for (int64_t k = 0; k < held; k++) sure[k] = expf(sure[k] - most) / sum;
}

/* Keeps the best of those that are kept and node `node`; of two that are as good, the earlier one comes first. */
static void keep(Tree *t, int64_t node) {
    const double score = t->scores[node];
    if (score == -INFINITY) return;
    int64_t at = t->kept;
    for (; at > 0 && score > t->scores[t->best[at - 1]]; at--) t->best[at] = t->best[at - 1];
    t->best[at] = node;
    if (t->kept < t->nodes) t->kept++;
}

/* Reads the nodes that are to be read, from the states of those read last. Returns what `step_of_head` does. */
static int64_t read_nodes(const Head *h, const Pass *s, Tree *t, number *keys, number *values, int64_t capacity) {
    const Layer *l = &h->layer;
    const int64_t size = l->hidden, first = t->read, turned = l->head_size;
    const int64_t level = t->depths[t->reading[0]] - 1; /* all are of one level, with one position */
    int64_t count = 0;
    memcpy(t->before, t->states, t->beam * size * sizeof(number));
    number *from = t->space + 3 * t->beam * size;
    for (int64_t c = 0; c < t->width; c++) {
        const int64_t node = t->reading[c], above = t->parents[node];
        t->ids[c] = t->tokens[node];
        t->columns[node] = first + c;
        t->places[c] = t->known + first + c;
        const int64_t of_parent = above < 0 ? 0 : t->columns[above] - t->last;
        memcpy(from + c * size, t->before + of_parent * size, size * sizeof(number));
        memcpy(t->angles + c * turned, s->cos + level * turned, turned * sizeof(number));
        memcpy(t->angles + (t->beam + c) * turned, s->sin + level * turned, turned * sizeof(number));
        t->starts[c] = count;
        for (int64_t slot = 0; slot < t->known; slot++) t->slots[count++] = slot;
        int64_t place = count += level;
        for (int64_t on_path = above; on_path >= 0; on_path = t->parents[on_path])
            t->slots[--place] = t->known + t->columns[on_path];
        t->slots[count++] = t->places[c];
    }
    t->starts[t->width] = count;
    Pass own = *s;
    own.width = t->width, own.cos = t->angles, own.sin = t->angles + t->beam * turned, own.angles = 1;
    own.places = t->places, own.slots = t->slots, own.starts = t->starts;
    t->last = first;
    t->read += t->width;
    return step_of_head(h, &own, t->ids, from, keys, values, capacity, t->space, t->states);
}

/* Reads a level of the tree, at first none, and finds the candidates after its nodes. Returns the probability of the first one, which
   is not a number if a logit is not, or if a node has no embedding. s: of the position after the text; cosines and sines of the next ones follow. */
float read_level(const Head *h, const Pass *s, Tree *t, number *keys, number *values, int64_t capacity) {
    const int64_t n = t->width ? t->width : 1, outputs = h->output.outputs, from = t->found;
    if (t->width && read_nodes(h, s, t, keys, values, capacity)) return NAN;
    logits_of_head(h, t->states, n, t->space, t->logits, t->scratch, (int)s->threads);
    int64_t *which = t->tokens + from;
    float *sure = t->sure + from;
#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t c = 0; c < n; c++)
        most_probable(t->logits + c * outputs, h->vocabulary, t->candidates, which + c * t->candidates, sure + c * t->candidates);
    return sure[0];
}

/* Adds the candidates that `read_level` has found to the tree. Returns how many nodes can be read next. */
int64_t add_level(const Head *h, Tree *t) {
    const int64_t n = t->width ? t->width : 1, from = t->found;
    for (int64_t c = 0; c < n; c++) {
        const int64_t above = t->width ? t->reading[c] : -1;
        if (above >= 0) t->children[above] = t->found;
        for (int64_t k = 0; k < t->candidates; k++) {
            const int64_t node = t->found++;
            const double rate = rate_of(t, t->sure[node], k);
            if (h->tokens) t->tokens[node] = h->tokens[t->tokens[node]];
            t->parents[node] = above, t->columns[node] = t->children[node] = -1;
            t->depths[node] = above < 0 ? 1 : t->depths[above] + 1;
            t->scores[node] = (above < 0 ? 0 : t->scores[above]) + (rate > 0 ? log(rate) : -INFINITY);
        }
    }
    for (int64_t node = from; node < t->found; node++) keep(t, node);
    t->width = 0;
    for (int64_t i = 0; i < t->kept && t->width < t->beam; i++) {
        const int64_t node = t->best[i];
        if (node >= from && t->depths[node] < t->depth) t->reading[t->width++] = node;
    }
    return t->read + t->width > t->room ? 0 : t->width;
}
