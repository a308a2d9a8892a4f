/* One iteration of a Llama-like decoder, from token ids to logits, and the draw of tokens from logits.
 *
 * HEAD_DIM, BLOCK (tokens of a cache block) and GROUP (query heads per key-value head) are set by the compiler's command
 * line. Arithmetic is in float32, also over bfloat16 weights. Every row is computed alone, in one order: what a token
 * gets does not depend on who else is in the batch. A team of threads goes through the phases of an iteration together;
 * within a phase each takes the next task, so that none waits long for one that was held up. */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TALL 14 /* rows of a product computed together: as many as registers hold the sums of */
#elif defined(__AVX__)
#define LANES 8
#define TALL 6
#else
#define LANES 4
#define TALL 6
#endif
#define PANEL (2 * LANES) /* columns of a product computed together */
#define STRIPE (16 * TALL) /* rows that stay in the cache while the panels pass by */
#define AHEAD 16           /* rows of a panel prefetched */
#define APART(N) ((N) + LANES) /* rows that are multiplied lie apart so that they do not share places in the cache */
#define SPINS 4096        /* looks at a phase that others have not finished before the core is offered to others */
#define HALF (HEAD_DIM / 2)
#define LOG2_E 1.4426950408889634f
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));

/* ---- the team ---- */

typedef struct {
    int64_t threads, arrived, finished, next; /* finished: phases that all have left */
} Team;

typedef struct {
    Team *team;
    int64_t phase;
} Member;

/* The next task of the phase, from 0 on; together the members get each number once. */
INLINE int64_t claim(Member *me) { return __atomic_fetch_add(&me->team->next, 1, __ATOMIC_RELAXED); }

/* The next rows of the phase, in [first, end), not too few: tokens that follow each other share lines of the cache. */
INLINE int claim_rows(Member *me, int64_t rows, int64_t *first, int64_t *end) {
    int64_t share = rows / (8 * me->team->threads);
    share = share < 1 ? 1 : share > 64 ? 64 : share;
    *first = claim(me) * share;
    *end = *first + share < rows ? *first + share : rows;
    return *first < rows;
}

/* Returns when everybody has finished the phase. */
static void meet(Member *me) {
    Team *team = me->team;
    me->phase++;
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == me->phase * team->threads) {
        __atomic_store_n(&team->next, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->finished, me->phase, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t i = 1; __atomic_load_n(&team->finished, __ATOMIC_ACQUIRE) < me->phase; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        if (i % SPINS == 0) sched_yield();
    }
}

/* ---- functions of one row ---- */

/* 2^x for x <= 0, to 1e-7. Below the smallest normal number it gives that. Not a number stays so. */
static inline float power_of_2(float x) {
    x = x < -126.0f ? -126.0f : x;
    float whole = floorf(x + 0.5f);
    float f = (x - whole) * 0.6931471805599453f;
    float series = 1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    int32_t exponent = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return series * scale;
}

/* Zero where the logit is minus infinity. */
static inline float weight(float logit, float peak, float scale) {
    float exponent = (logit - peak) * scale;
    return exponent < -126.0f ? 0.0f : power_of_2(exponent);
}

static inline float inverse_rms(const float *x, int64_t n, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)n + eps);
}

/* A copy if weight is null. */
static void rms_norm(const float *x, const float *weight, float eps, float *out, int64_t n) {
    if (!weight) {
        memcpy(out, x, n * 4);
        return;
    }
    float r = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * r * weight[i];
}

/* One head: norm (unless weight is null), rotation by the angles of its position (unless cosine is null), scale. */
static void rotate(const float *x, const float *weight, float r, const float *cosine, const float *sine, float scale,
                   float *out, int64_t stride) {
    float normed[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; i++) normed[i] = weight ? x[i] * r * weight[i] : x[i];
    if (!cosine) {
        for (int i = 0; i < HEAD_DIM; i++) out[i * stride] = normed[i] * scale;
        return;
    }
    for (int i = 0; i < HALF; i++) {
        out[i * stride] = (normed[i] * cosine[i] - normed[i + HALF] * sine[i]) * scale;
        out[(i + HALF) * stride] = (normed[i + HALF] * cosine[i] + normed[i] * sine[i]) * scale;
    }
}

/* ---- matrices ---- */

/* packed[panels][in][PANEL]: the columns of a panel of each input together, so that a product reads its weights once, from
 * the beginning to the end. In a gated matrix the first half of a panel's columns are gates, the second those they gate. */
typedef struct {
    void *packed;
    int64_t in, out; /* numbers of a row of x, and of the result */
    int64_t bfloat16, gated;
    const float *bias; /* or null */
} Matrix;

INLINE int64_t width_of(const Matrix *m) { return m->gated ? LANES : PANEL; }

INLINE int64_t num_panels(const Matrix *m) { return (m->out + width_of(m) - 1) / width_of(m); }

/* The output, counted as in `pack`, that stands in a column of a panel; -1 for none. */
static int64_t output_at(const Matrix *m, int64_t panel, int64_t column) {
    int64_t second = m->gated && column >= LANES, output = panel * width_of(m) + column - second * LANES;
    return output < m->out ? output + second * m->out : -1;
}

/* weights[rows, in] become outputs first, first + 1, ...; of a gated matrix all gates come first. In bfloat16, columns c and
 * c + LANES share a word, so that a shift and a mask widen them. */
void pack(const Matrix *m, const void *weights, int64_t first, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < num_panels(m); panel++) {
        int64_t row[PANEL];
        for (int c = 0; c < PANEL; c++) row[c] = output_at(m, panel, c) - first;
        for (int64_t k = 0; k < m->in; k++)
            for (int c = 0; c < PANEL; c++) {
                if (row[c] < 0 || row[c] >= rows) continue;
                if (m->bfloat16)
                    ((uint16_t *)m->packed)[(panel * m->in + k) * PANEL + c % LANES * 2 + c / LANES] =
                        ((const uint16_t *)weights)[row[c] * m->in + k];
                else
                    ((float *)m->packed)[(panel * m->in + k) * PANEL + c] = ((const float *)weights)[row[c] * m->in + k];
            }
    }
}

INLINE void widen(const char *row, int bfloat16, lanes w[2]) {
    if (bfloat16) {
        bits both = *(const bits *)row;
        w[0] = (lanes)(both << 16), w[1] = (lanes)(both & 0xffff0000u);
    } else {
        w[0] = *(const lanes *)row, w[1] = *((const lanes *)row + 1);
    }
}

/* sums[r] = the products of x[r, APART(in)] with a panel. Meanwhile in / 2 lines of what is needed later are fetched. */
INLINE void multiply(const float *x, int64_t in, const char *panel, const char *later, int height, int bfloat16,
                     lanes sums[][2]) {
    const int64_t step = PANEL * (bfloat16 ? 2 : 4);
    const float *row[TALL];
    lanes sum[TALL][2];
#pragma GCC unroll 16
    for (int r = 0; r < height; r++) row[r] = x + r * APART(in), sum[r][0] = sum[r][1] = (lanes){0};
    for (int64_t k = 0; k < in; k++, panel += step) {
        lanes w[2];
        widen(panel, bfloat16, w);
        __builtin_prefetch(panel + AHEAD * step);
        __builtin_prefetch(panel + AHEAD * step + step / 2);
        __builtin_prefetch(later + k / 2 * 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < height; r++) {
            sum[r][0] += row[r][k] * w[0];
            sum[r][1] += row[r][k] * w[1];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < height; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

typedef void (*Multiply)(const float *, int64_t, const char *, const char *, lanes[][2]);
#define OF_HEIGHT(N)                                                                                    \
    static void float_##N(const float *x, int64_t in, const char *panel, const char *later, lanes s[][2]) { \
        multiply(x, in, panel, later, N, 0, s);                                                         \
    }                                                                                                   \
    static void bfloat_##N(const float *x, int64_t in, const char *panel, const char *later, lanes s[][2]) { \
        multiply(x, in, panel, later, N, 1, s);                                                         \
    }
#define BOTH(N) {float_##N, bfloat_##N}
OF_HEIGHT(1) OF_HEIGHT(2) OF_HEIGHT(3) OF_HEIGHT(4) OF_HEIGHT(5) OF_HEIGHT(6)
#if TALL == 14
OF_HEIGHT(7) OF_HEIGHT(8) OF_HEIGHT(9) OF_HEIGHT(10) OF_HEIGHT(11) OF_HEIGHT(12) OF_HEIGHT(13) OF_HEIGHT(14)
#endif
static const Multiply of_height[TALL][2] = {
    BOTH(1), BOTH(2), BOTH(3), BOTH(4), BOTH(5), BOTH(6),
#if TALL == 14
    BOTH(7), BOTH(8), BOTH(9), BOTH(10), BOTH(11), BOTH(12), BOTH(13), BOTH(14),
#endif
};

/* silu(gate) * value */
static void store_gated(const float *sums, float *out, int64_t columns) {
    float results[LANES];
    for (int i = 0; i < LANES; i++) {
        float gate = sums[i], e = power_of_2(-fabsf(gate) * LOG2_E);
        results[i] = gate * (gate < 0 ? e : 1.0f) / (1.0f + e) * sums[LANES + i];
    }
    for (int64_t i = 0; i < columns; i++) out[i] = results[i];
}

static void store(const float *sums, const float *bias, float scale, int add, float *out, int64_t columns) {
    for (int64_t i = 0; i < columns; i++) out[i] = (sums[i] + (bias ? bias[i] : 0.0f)) * scale + (add ? out[i] : 0.0f);
}

/* Columns of out[first to end, stride] = x[first to end, APART(m->in)] times a panel, or that added to out. Meanwhile what
 * lies at `later` is fetched. */
INLINE void panel_product(const Matrix *m, int64_t index, const char *later, const float *x, float *out, int64_t stride,
                          int64_t first, int64_t end, float scale, int add) {
    int64_t width = width_of(m), left = index * width, columns = m->out - left < width ? m->out - left : width;
    int64_t panel_bytes = m->in * PANEL * (m->bfloat16 ? 2 : 4), tiles = (end - first + TALL - 1) / TALL;
    const char *panel = (const char *)m->packed + index * panel_bytes;
    for (int64_t tile = 0, top = first; tile < tiles; tile++) {
        int64_t height = (end - top + tiles - tile - 1) / (tiles - tile), fetched = tile * m->in * 32;
        lanes sums[TALL][2];
        of_height[height - 1][m->bfloat16](x + top * APART(m->in), m->in, panel,
                                           fetched < panel_bytes ? later + fetched : panel, sums);
        for (int64_t r = 0; r < height; r++) {
            float *to = out + (top + r) * stride + left;
            if (m->gated)
                store_gated((const float *)sums[r], to, columns);
            else
                store((const float *)sums[r], m->bias ? m->bias + left : 0, scale, add, to, columns);
        }
        top += height;
    }
}

/* out[rows, stride] = scale times x[rows, APART(m->in)] times the matrix, or that added to out. A task is a panel and some
 * rows. */
static void product(Member *me, const Matrix *m, const float *x, float *out, int64_t stride, int64_t rows, float scale,
                    int add) {
    int64_t panels = num_panels(m), stripes = (rows + STRIPE - 1) / STRIPE, task = claim(me), next;
    int64_t panel_bytes = m->in * PANEL * (m->bfloat16 ? 2 : 4);
    for (; task < panels * stripes; task = next) {
        next = claim(me);
        int64_t first = task / panels * STRIPE, end = first + STRIPE < rows ? first + STRIPE : rows;
        const char *later = (const char *)m->packed + next % panels * panel_bytes;
        panel_product(m, task % panels, later, x, out, stride, first, end, scale, add);
    }
    meet(me);
}

int panel_width(void) { return PANEL; }

int apart(void) { return APART(0); }

/* ---- drawing ---- */

#define CHUNK 64

/* The first token at which the cumulative share of 2^(scale (logit - largest)) exceeds the uniform number, and the logarithm
 * of its share. A negative uniform number asks for the largest logit. */
static void draw_token(const float *x, int64_t n, float scale, double uniform, int64_t *drawn, float *logprob) {
    float peak = x[0];
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    double total = 0.0;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = start + CHUNK < n ? start + CHUNK : n;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t i = start; i < end; i++) part += weight(x[i], peak, scale);
        total += part;
    }
    int64_t token = 0;
    if (uniform < 0) {
        while (token < n - 1 && x[token] != peak) token++;
    } else {
        double rest = uniform * total, before = 0.0;
        for (int64_t start = 0; start < n; start += CHUNK) {
            int64_t end = start + CHUNK < n ? start + CHUNK : n;
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = start; i < end; i++) part += weight(x[i], peak, scale);
            if (part > 0) token = end - 1;
            if (before + part > rest) {
                double sum = before;
                for (int64_t i = start; i < end && sum <= rest; i++) {
                    float w = weight(x[i], peak, scale);
                    if (w > 0) token = i;
                    sum += w;
                }
                break;
            }
            before += part;
        }
    }
    *drawn = token;
    *logprob = (float)(((double)(x[token] - peak) * scale - log2(total)) * 0.6931471805599453);
}

/* ---- the decoder ---- */

/* Queries and keys have a norm for each head (HEAD_DIM weights), or one over all heads if norms_all. */
typedef struct {
    Matrix qkv, output, gate_up, down;           /* the last two are undefined in a layer with experts */
    Matrix router;                               /* undefined in a layer without */
    const Matrix *gate_ups, *downs;              /* of each expert; null without */
    int64_t window, rotates, norms_all;          /* window: the tokens that a token attends to; 0 for all */
    const float *input_norm, *output_norm, *mlp_norm, *mlp_output_norm, *q_norm, *k_norm; /* each may be null */
    float *keys, *values;                        /* [blocks, K, HEAD_DIM, BLOCK], [blocks, K, BLOCK, HEAD_DIM] */
} Layer;

typedef struct {
    int64_t hidden, num_kv, num_layers, bfloat16;
    int64_t num_experts, per_token, normalises; /* normalises: the weights of a token's experts sum to 1 */
    float eps, embedding_scale, attention_scale, residual_scale, logit_scale;
    const void *embedding;
    const float *norm, *cosines, *sines;
    Matrix lm_head;
    const Layer *layers;
} Model;

/* Tokens packed one sequence after another. A run is some consecutive tokens of a sequence, at most TOGETHER. */
typedef struct {
    int64_t num_tokens, num_runs, width;
    const int64_t *token_ids, *positions, *rows;  /* of each token: id, position, row of its block table */
    const int64_t *run_starts, *run_lengths;      /* first token, number of tokens */
    const int64_t *tables;                        /* [sequences, width] */
    float *x, *normed, *qkv, *mixed; /* [tokens, ...]: hidden, APART(hidden), qkv.out, APART(max(heads, intermediate)) */
    float *logits;                   /* [tokens, vocab] or null */
    float *scores, *weights;         /* [tokens, experts], [tokens, per_token] */
    int32_t *chosen;                 /* [layers with experts, tokens, per_token]: ids of experts, the best one first */
    int64_t *places, *starts, *used; /* of each choice: its row among those sorted by expert; of each expert: its first
                                        row, [experts + 1]; the experts that were chosen, [1 + experts], their number first */
    float *gathered, *inner;         /* [tokens * per_token, ...]: APART(hidden), APART(inner size of an expert) */
    const float *scales;             /* of each token, as `draw_token` takes them; or null */
    const double *uniforms;
    int64_t *drawn;
    float *logprobs;
} Batch;

#define TOGETHER (GROUP >= 8 ? 1 : 8 / GROUP)

int longest_run(void) { return TOGETHER; }

static void embed(const Model *m, int64_t id, float *out) {
    if (m->bfloat16) {
        const uint16_t *row = (const uint16_t *)m->embedding + id * m->hidden;
        for (int64_t i = 0; i < m->hidden; i++) {
            uint32_t wide = (uint32_t)row[i] << 16;
            memcpy(out + i, &wide, 4);
        }
    } else {
        memcpy(out, (const float *)m->embedding + id * m->hidden, m->hidden * 4);
    }
    for (int64_t i = 0; m->embedding_scale != 1.0f && i < m->hidden; i++) out[i] *= m->embedding_scale;
}

/* Head h of those at `heads`, normalised and rotated; r is the inverse root mean square of all of them, for norms_all. */
static void place_head(const Model *m, const Layer *layer, const float *heads, int64_t h, const float *weight, float r,
                       int64_t position, float scale, float *out, int64_t stride) {
    const float *x = heads + h * HEAD_DIM, *cosine = layer->rotates ? m->cosines + position * HALF : 0;
    if (weight && layer->norms_all)
        weight += h * HEAD_DIM;
    else if (weight)
        r = inverse_rms(x, HEAD_DIM, m->eps);
    rotate(x, weight, r, cosine, m->sines + position * HALF, scale, out, stride);
}

/* Rotates the queries of a token in place, scaled so that scores are exponents of 2; its key and value go to the cache. */
static void place_heads(const Model *m, const Layer *layer, const Batch *b, int64_t token) {
    int64_t position = b->positions[token], block = b->tables[b->rows[token] * b->width + position / BLOCK];
    int64_t num_kv = m->num_kv, num_q = GROUP * num_kv, offset = position % BLOCK;
    float *heads = b->qkv + token * layer->qkv.out, *keys = heads + num_q * HEAD_DIM, *values = keys + num_kv * HEAD_DIM;
    float of_q = layer->norms_all ? inverse_rms(heads, num_q * HEAD_DIM, m->eps) : 1.0f;
    float of_k = layer->norms_all ? inverse_rms(keys, num_kv * HEAD_DIM, m->eps) : 1.0f;
    for (int64_t h = 0; h < num_q; h++)
        place_head(m, layer, heads, h, layer->q_norm, of_q, position, m->attention_scale * LOG2_E, heads + h * HEAD_DIM, 1);
    for (int64_t k = 0; k < num_kv; k++) {
        int64_t cell = (block * num_kv + k) * HEAD_DIM * BLOCK;
        place_head(m, layer, keys, k, layer->k_norm, of_k, position, 1.0f, layer->keys + cell + offset, BLOCK);
        memcpy(layer->values + cell + offset * HEAD_DIM, values + k * HEAD_DIM, HEAD_DIM * 4);
    }
}

#define WIDEST(N) ((N) % LANES == 0 ? LANES : (N) % 8 == 0 ? 8 : (N) % 4 == 0 ? 4 : 1)
typedef float some_tokens __attribute__((vector_size(4 * WIDEST(BLOCK)), aligned(4)));
typedef float some_numbers __attribute__((vector_size(4 * WIDEST(HEAD_DIM)), aligned(4)));
#define TOKEN_VECTORS (BLOCK / WIDEST(BLOCK))
#define HEAD_VECTORS (HEAD_DIM / WIDEST(HEAD_DIM))

/* The attention of `count` consecutive tokens, in GROUP heads each, of key-value head k. The softmax is taken block by block
 * (Milakov & Gimelshein, arXiv 1805.02867). */
INLINE void attend(const Model *m, const Layer *layer, const Batch *b, int64_t token, int64_t k, int count) {
    enum { MOST = TOGETHER * GROUP };
    const int queries = count * GROUP;
    const int64_t *table = b->tables + b->rows[token] * b->width, last = b->positions[token] + count - 1;
    const int64_t window = layer->window, oldest = window && last - count + 2 > window ? last - count + 2 - window : 0;
    const float *q[MOST];
    float top[MOST], total[MOST];
    some_numbers sum[MOST][HEAD_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < queries; r++) {
        q[r] = b->qkv + (token + r / GROUP) * layer->qkv.out + (k * GROUP + r % GROUP) * HEAD_DIM;
        top[r] = -INFINITY, total[r] = 0.0f;
        for (int i = 0; i < HEAD_VECTORS; i++) sum[r][i] = (some_numbers){0};
    }
    for (int64_t j = oldest / BLOCK; j <= last / BLOCK; j++) {
        int64_t cell = (table[j] * m->num_kv + k) * HEAD_DIM * BLOCK;
        const float *keys = layer->keys + cell, *values = layer->values + cell;
        const float *next = layer->keys + (table[j < last / BLOCK ? j + 1 : j] * m->num_kv + k) * HEAD_DIM * BLOCK;
        some_tokens score[MOST][TOKEN_VECTORS];
        for (int i = 0; i < TOKEN_VECTORS; i += 2) { /* two vectors of tokens: their sums stay in registers */
            const int n = TOKEN_VECTORS - i < 2 ? 1 : 2;
            some_tokens even[MOST][2], odd[MOST][2];
#pragma GCC unroll 16
            for (int r = 0; r < queries; r++)
                even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = (some_tokens){0};
            for (int d = 0; d < HEAD_DIM; d += 2) {
                const some_tokens *kd = (const some_tokens *)(keys + d * BLOCK) + i;
                const some_tokens *ke = (const some_tokens *)(keys + (d + 1) * BLOCK) + i;
                for (int t = 0; t < 2 * BLOCK; t += 16) __builtin_prefetch(values + d * BLOCK + t);
#pragma GCC unroll 16
                for (int r = 0; r < queries; r++)
                    for (int v = 0; v < n; v++) {
                        even[r][v] += q[r][d] * kd[v];
                        odd[r][v] += q[r][d + 1] * ke[v];
                    }
            }
#pragma GCC unroll 16
            for (int r = 0; r < queries; r++)
                for (int v = 0; v < n; v++) score[r][i + v] = even[r][v] + odd[r][v];
        }
        int64_t seen = last - j * BLOCK + 1;
        for (int r = 0; r < queries; r++) {
            float *s = (float *)score[r], peak = top[r], part = 0.0f;
            int64_t visible = seen - count + 1 + r / GROUP, hidden = window ? visible - window : 0;
            for (int64_t t = 0; t < hidden && t < BLOCK; t++) s[t] = -INFINITY;
            for (int64_t t = visible < 0 ? 0 : visible; t < BLOCK; t++) s[t] = -INFINITY;
#pragma omp simd reduction(max : peak)
            for (int t = 0; t < BLOCK; t++) peak = s[t] > peak ? s[t] : peak;
            float shrink = top[r] == peak ? 1.0f : power_of_2(top[r] - peak); /* both may be minus infinity */
#pragma omp simd reduction(+ : part)
            for (int t = 0; t < BLOCK; t++) part += s[t] = s[t] == -INFINITY ? 0.0f : power_of_2(s[t] - peak);
            top[r] = peak, total[r] = total[r] * shrink + part;
            for (int i = 0; i < HEAD_VECTORS; i++) sum[r][i] *= shrink;
        }
        for (int i = 0; i < HEAD_VECTORS; i += 2) {
            const int n = HEAD_VECTORS - i < 2 ? 1 : 2;
            some_numbers part[MOST][2];
#pragma GCC unroll 16
            for (int r = 0; r < queries; r++)
                for (int v = 0; v < n; v++) part[r][v] = sum[r][i + v];
            for (int t = 0; t < (seen < BLOCK ? seen : BLOCK); t++) {
                const some_numbers *vt = (const some_numbers *)(values + t * HEAD_DIM) + i;
                if (i == 0)
                    for (int d = 0; d < HEAD_DIM; d += 16) __builtin_prefetch(next + t * HEAD_DIM + d);
#pragma GCC unroll 16
                for (int r = 0; r < queries; r++)
                    for (int v = 0; v < n; v++) part[r][v] += ((const float *)score[r])[t] * vt[v];
            }
#pragma GCC unroll 16
            for (int r = 0; r < queries; r++)
                for (int v = 0; v < n; v++) sum[r][i + v] = part[r][v];
        }
    }
    for (int r = 0; r < queries; r++) {
        float *out = b->mixed + (token + r / GROUP) * APART(layer->output.in) + (k * GROUP + r % GROUP) * HEAD_DIM;
        for (int i = 0; i < HEAD_VECTORS; i++) ((some_numbers *)out)[i] = sum[r][i] / total[r];
    }
}

static void attention(Member *me, const Model *m, const Layer *layer, const Batch *b) {
    for (int64_t task; (task = claim(me)) < b->num_runs * m->num_kv;) {
        int64_t run = task / m->num_kv, k = task % m->num_kv, first = b->run_starts[run], count = b->run_lengths[run];
        if (count == TOGETHER)
            attend(m, layer, b, first, k, TOGETHER);
        else
            for (int64_t i = 0; i < count; i++) attend(m, layer, b, first + i, k, 1);
    }
    meet(me);
}

static void normalize(Member *me, const Model *m, const Batch *b, const float *weight) {
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (; t < end; t++)
            rms_norm(b->x + t * m->hidden, weight, m->eps, b->normed + t * APART(m->hidden), m->hidden);
    meet(me);
}

/* Adds a product, or its norm, to the hidden state. */
static void add_product(Member *me, const Model *m, const Batch *b, const Matrix *matrix, const float *norm) {
    if (!norm) {
        product(me, matrix, b->mixed, b->x, m->hidden, b->num_tokens, m->residual_scale, 1);
        return;
    }
    product(me, matrix, b->mixed, b->normed, APART(m->hidden), b->num_tokens, 1.0f, 0);
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (; t < end; t++) {
            float *added = b->normed + t * APART(m->hidden), *x = b->x + t * m->hidden;
            rms_norm(added, norm, m->eps, added, m->hidden);
            for (int64_t i = 0; i < m->hidden; i++) x[i] += m->residual_scale * added[i];
        }
    meet(me);
}

/* ---- experts ---- */

/* The experts of a token by falling score, the lower id first where scores are equal, and their shares of e^score. */
static void choose(const Model *m, float *scores, int32_t *ids, float *weights) {
    float peak = scores[0], total = 0.0f, chosen = 0.0f;
    for (int64_t e = 0; e < m->num_experts; e++) peak = scores[e] > peak ? scores[e] : peak;
    for (int64_t e = 0; e < m->num_experts; e++) total += weight(scores[e], peak, LOG2_E);
    for (int64_t j = 0; j < m->per_token; j++) {
        int64_t best = 0;
        for (int64_t e = 1; e < m->num_experts; e++) best = scores[e] > scores[best] ? e : best;
        ids[j] = (int32_t)best, weights[j] = weight(scores[best], peak, LOG2_E), chosen += weights[j];
        scores[best] = -INFINITY;
    }
    for (int64_t j = 0; j < m->per_token; j++) weights[j] /= m->normalises ? chosen : total;
}

/* Gives each choice a row, those of one expert after those of another (a counting sort). */
static void sort_choices(const Model *m, const Batch *b, const int32_t *ids) {
    int64_t num = b->num_tokens * m->per_token, *cursors = b->used + 1;
    memset(b->starts, 0, (m->num_experts + 1) * sizeof(int64_t));
    for (int64_t n = 0; n < num; n++) b->starts[ids[n] + 1]++;
    for (int64_t e = 0; e < m->num_experts; e++) cursors[e] = b->starts[e], b->starts[e + 1] += b->starts[e];
    for (int64_t n = 0; n < num; n++) b->places[n] = cursors[ids[n]]++;
    b->used[0] = 0;
    for (int64_t e = 0; e < m->num_experts; e++)
        if (b->starts[e + 1] > b->starts[e]) b->used[++b->used[0]] = e;
}

/* The products of all rows with the matrices of their experts. A task is a panel of an expert. */
static void expert_products(Member *me, const Matrix *matrices, const Batch *b, const float *x, float *out, int64_t stride) {
    int64_t panels = num_panels(matrices), tasks = b->used[0] * panels, task = claim(me), next;
    int64_t panel_bytes = matrices->in * PANEL * (matrices->bfloat16 ? 2 : 4);
    for (; task < tasks; task = next) {
        next = claim(me);
        int64_t e = b->used[1 + task / panels], end = b->starts[e + 1], then = next < tasks ? next : task;
        const char *later = (const char *)matrices[b->used[1 + then / panels]].packed + then % panels * panel_bytes;
        for (int64_t first = b->starts[e]; first < end; first += STRIPE) {
            int64_t last = first + STRIPE < end ? first + STRIPE : end;
            panel_product(matrices + e, task % panels, later, x, out, stride, first, last, 1.0f, 0);
        }
    }
    meet(me);
}

/* Adds the outputs of the experts of each token to its hidden state, the best expert's first. */
static void add_experts(Member *me, const Model *m, const Layer *layer, const Batch *b, int32_t *ids) {
    const int64_t k = m->per_token, width = APART(m->hidden);
    product(me, &layer->router, b->normed, b->scores, m->num_experts, b->num_tokens, 1.0f, 0);
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (; t < end; t++) choose(m, b->scores + t * m->num_experts, ids + t * k, b->weights + t * k);
    meet(me);
    if (claim(me) == 0) sort_choices(m, b, ids);
    meet(me);
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (int64_t n = t * k; n < end * k; n++)
            memcpy(b->gathered + b->places[n] * width, b->normed + n / k * width, m->hidden * 4);
    meet(me);
    expert_products(me, layer->gate_ups, b, b->gathered, b->inner, APART(layer->downs->in));
    expert_products(me, layer->downs, b, b->inner, b->gathered, width);
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (; t < end; t++)
            for (int64_t i = 0; i < m->hidden; i++) {
                float sum = 0.0f;
                for (int64_t n = t * k; n < (t + 1) * k; n++) sum += b->weights[n] * b->gathered[b->places[n] * width + i];
                b->x[t * m->hidden + i] += sum;
            }
    meet(me);
}

static void iterate(Member *me, const Model *m, const Batch *b) {
    int32_t *ids = b->chosen;
    for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
        for (; t < end; t++) embed(m, b->token_ids[t], b->x + t * m->hidden);
    meet(me);
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *layer = m->layers + i;
        normalize(me, m, b, layer->input_norm);
        product(me, &layer->qkv, b->normed, b->qkv, layer->qkv.out, b->num_tokens, 1.0f, 0);
        for (int64_t t, end; claim_rows(me, b->num_tokens, &t, &end);)
            for (; t < end; t++) place_heads(m, layer, b, t);
        meet(me);
        attention(me, m, layer, b);
        add_product(me, m, b, &layer->output, layer->output_norm);
        normalize(me, m, b, layer->mlp_norm);
        if (layer->gate_ups) {
            add_experts(me, m, layer, b, ids);
            ids += b->num_tokens * m->per_token;
            continue;
        }
        product(me, &layer->gate_up, b->normed, b->mixed, APART(layer->gate_up.out), b->num_tokens, 1.0f, 0);
        add_product(me, m, b, &layer->down, layer->mlp_output_norm);
    }
    if (!b->logits) return;
    normalize(me, m, b, m->norm);
    product(me, &m->lm_head, b->normed, b->logits, m->lm_head.out, b->num_tokens, m->logit_scale, 0);
    if (!b->scales) return;
    for (int64_t t; (t = claim(me)) < b->num_tokens;)
        draw_token(b->logits + t * m->lm_head.out, m->lm_head.out, b->scales[t], b->uniforms[t], b->drawn + t, b->logprobs + t);
}

/* Writes keys and values of the tokens to the cache and, where wanted, gives their logits and draws from them. */
void forward(const Model *m, const Batch *b, int threads) {
    Team team = {.threads = 1};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
#pragma omp single
        team.threads = omp_get_num_threads();
#endif
        Member me = {&team, 0};
        iterate(&me, m, b);
    }
}

/* From logits[rows, n]. */
void draw_tokens(const float *logits, const float *scales, const double *uniforms, int64_t *drawn, float *logprobs,
                 int64_t rows, int64_t n, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        draw_token(logits + row * n, n, scales[row], uniforms[row], drawn + row, logprobs + row);
}
