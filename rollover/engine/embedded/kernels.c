/* Fused float32 kernels of one decode iteration.
 *
 * HEAD_DIM, BLOCK (tokens of a cache block) and GROUP (query heads per key-value head) are set by the compiler's command
 * line. Every row is computed alone, in one order: what a sequence gets does not depend on who else is in the batch. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PANEL (2 * LANES) /* columns of the output computed together */
#define TILE 8            /* with so many rows */
#define AHEAD 16          /* rows of a panel prefetched */
#define HALF (HEAD_DIM / 2)
#define LOG2_E 1.4426950408889634f

/* 2^x for x <= 0, to 1e-7. Below the smallest normal number it gives that. Not a number stays so. */
static inline float power_of_2(float x) {
    x = x < -126.0f ? -126.0f : x;
    float whole = floorf(x + 0.5f);
    float f = (x - whole) * 0.6931471805599453f;
    float series = 1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
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

/* One head: norm (unless weight is null), rotation by the angles of its position, scale. */
static inline void rotate(const float *x, const float *weight, float eps, const float *cosine, const float *sine,
                          float scale, float *out) {
    float normed[HEAD_DIM];
    float r = weight ? inverse_rms(x, HEAD_DIM, eps) : 1.0f;
    for (int i = 0; i < HEAD_DIM; i++) normed[i] = weight ? x[i] * r * weight[i] : x[i];
    for (int i = 0; i < HALF; i++) {
        out[i] = (normed[i] * cosine[i] - normed[i + HALF] * sine[i]) * scale;
        out[i + HALF] = (normed[i + HALF] * cosine[i] + normed[i] * sine[i]) * scale;
    }
}

void rms_norm(const float *x, const float *weight, float eps, float *out, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * n;
        float r = inverse_rms(in, n, eps);
        for (int64_t i = 0; i < n; i++) out[row * n + i] = in[i] * r * weight[i];
    }
}

/* gate_up[rows, 2 n]: silu(gate) * up. */
void silu_product(const float *gate_up, float *out, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * n, *up = gate + n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float e = power_of_2(-fabsf(gate[i]) * LOG2_E);
            out[row * n + i] = gate[i] * (gate[i] < 0 ? e : 1.0f) / (1.0f + e) * up[i];
        }
    }
}

/* qkv[B, (GROUP + 2) K, HEAD_DIM] of the token at position lengths[b] of each sequence; keys[blocks, K, HEAD_DIM, BLOCK]
 * and values[blocks, K, BLOCK, HEAD_DIM] of this layer; tables[B, width]. Writes the token's key and value, then
 * out[B, GROUP K, HEAD_DIM]. The softmax is taken block by block (Milakov & Gimelshein, arXiv 1805.02867). */
void decode_attention(const float *qkv, const float *q_norm, const float *k_norm, float eps, const float *cosines,
                      const float *sines, float *keys, float *values, const int64_t *tables, int64_t width,
                      const int64_t *lengths, float *out, int64_t num_seqs, int64_t num_kv, int threads) {
    const float scale = LOG2_E / sqrtf(HEAD_DIM);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < num_seqs * num_kv; task++) {
        int64_t b = task / num_kv, k = task % num_kv, last = lengths[b] / BLOCK, offset = lengths[b] % BLOCK;
        const float *heads = qkv + b * (GROUP + 2) * num_kv * HEAD_DIM;
        const float *cosine = cosines + lengths[b] * HALF, *sine = sines + lengths[b] * HALF;
        const int64_t *table = tables + b * width;

        float q[GROUP][HEAD_DIM], key[HEAD_DIM];
        for (int g = 0; g < GROUP; g++)
            rotate(heads + (k * GROUP + g) * HEAD_DIM, q_norm, eps, cosine, sine, scale, q[g]);
        rotate(heads + (GROUP * num_kv + k) * HEAD_DIM, k_norm, eps, cosine, sine, 1.0f, key);
        int64_t tail = (table[last] * num_kv + k) * HEAD_DIM * BLOCK;
        for (int d = 0; d < HEAD_DIM; d++) keys[tail + d * BLOCK + offset] = key[d];
        memcpy(values + tail + offset * HEAD_DIM, heads + ((GROUP + 1) * num_kv + k) * HEAD_DIM, HEAD_DIM * 4);

        float top[GROUP], total[GROUP], sum[GROUP][HEAD_DIM];
        for (int g = 0; g < GROUP; g++) {
            top[g] = -INFINITY, total[g] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) sum[g][d] = 0.0f;
        }
        for (int64_t j = 0; j <= last; j++) {
            int visible = j < last ? BLOCK : (int)offset + 1;
            const float *restrict kb = keys + (table[j] * num_kv + k) * HEAD_DIM * BLOCK;
            const float *restrict vb = values + (table[j] * num_kv + k) * HEAD_DIM * BLOCK;
            float score[GROUP][BLOCK] = {{0.0f}};
            const float *next = keys + (table[j < last ? j + 1 : j] * num_kv + k) * HEAD_DIM * BLOCK;
            for (int d = 0; d < HEAD_DIM; d++) {
                for (int t = 0; t < BLOCK; t += 16) __builtin_prefetch(vb + d * BLOCK + t);
                for (int g = 0; g < GROUP; g++)
#pragma omp simd
                    for (int t = 0; t < BLOCK; t++) score[g][t] += q[g][d] * kb[d * BLOCK + t];
            }
            for (int g = 0; g < GROUP; g++) {
                float peak = top[g], part = 0.0f;
                for (int t = visible; t < BLOCK; t++) score[g][t] = -INFINITY;
#pragma omp simd reduction(max : peak)
                for (int t = 0; t < BLOCK; t++) peak = score[g][t] > peak ? score[g][t] : peak;
                float shrink = power_of_2(top[g] - peak);
#pragma omp simd reduction(+ : part)
                for (int t = 0; t < BLOCK; t++) part += score[g][t] = power_of_2(score[g][t] - peak);
                top[g] = peak, total[g] = total[g] * shrink + part;
                for (int d = 0; d < HEAD_DIM; d++) sum[g][d] *= shrink;
            }
            for (int t = 0; t < visible; t++) {
                for (int i = 0; i < HEAD_DIM; i += 16) __builtin_prefetch(next + t * HEAD_DIM + i);
                for (int g = 0; g < GROUP; g++)
#pragma omp simd
                    for (int d = 0; d < HEAD_DIM; d++) sum[g][d] += score[g][t] * vb[t * HEAD_DIM + d];
            }
        }
        for (int g = 0; g < GROUP; g++)
            for (int d = 0; d < HEAD_DIM; d++)
                out[((b * num_kv + k) * GROUP + g) * HEAD_DIM + d] = sum[g][d] / total[g];
    }
}

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));

/* Weights[rows, in] become rows first, first + 1, ... of packed[panels][in][PANEL]: the columns of the product. */
void pack_float(const float *weights, int64_t rows, int64_t in, int64_t first, float *packed, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t r = panel * PANEL + column - first;
                if (r >= 0 && r < rows) packed[(panel * in + k) * PANEL + column] = weights[r * in + k];
            }
}

/* The same for bfloat16: columns c and c + LANES of a panel share a word, so that a shift and a mask widen them. */
void pack_bfloat16(const uint16_t *weights, int64_t rows, int64_t in, int64_t first, uint16_t *packed, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t r = panel * PANEL + column - first, place = column % LANES * 2 + column / LANES;
                if (r >= 0 && r < rows) packed[(panel * in + k) * PANEL + place] = weights[r * in + k];
            }
}

static inline void widen_float(const float *row, lanes w[2]) {
    w[0] = *(const lanes *)row, w[1] = *(const lanes *)(row + LANES);
}

static inline void widen_bfloat16(const uint16_t *row, lanes w[2]) {
    bits both = *(const bits *)row;
    w[0] = (lanes)(both << 16), w[1] = (lanes)(both & 0xffff0000u);
}

/* out[rows, width] = x[rows, in] times the packed weights, or that added to out. Panels are shared among the threads, so
 * that each weight is read once. */
#define MATMUL(TYPE, NUMBER)                                                                                           \
    void matmul_##TYPE(const float *x, const NUMBER *packed, float *out, int64_t rows, int64_t in, int64_t width,      \
                       int add, int threads) {                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1)")                                              \
        for (int64_t left = 0; left < width; left += PANEL) {                                                          \
            const NUMBER *panel = packed + left * in;                                                                  \
            for (int64_t top = 0; top < rows; top += TILE) {                                                           \
                int height = rows - top < TILE ? (int)(rows - top) : TILE;                                             \
                const float *row[TILE];                                                                                \
                lanes sum[TILE][2];                                                                                    \
                for (int r = 0; r < TILE; r++) {                                                                       \
                    row[r] = x + (top + (r < height ? r : 0)) * in;                                                    \
                    sum[r][0] = sum[r][1] = (lanes){0};                                                                \
                }                                                                                                      \
                for (int64_t k = 0; k < in; k++) {                                                                     \
                    lanes w[2];                                                                                        \
                    widen_##TYPE(panel + k * PANEL, w);                                                                \
                    __builtin_prefetch(panel + (k + AHEAD) * PANEL);                                                   \
                    __builtin_prefetch(panel + (k + AHEAD) * PANEL + LANES);                                           \
                    for (int r = 0; r < TILE; r++) {                                                                   \
                        sum[r][0] += row[r][k] * w[0];                                                                 \
                        sum[r][1] += row[r][k] * w[1];                                                                 \
                    }                                                                                                  \
                }                                                                                                      \
                for (int r = 0; r < height; r++)                                                                       \
                    store((const float *)sum[r], out + (top + r) * width + left, width - left, add);                   \
            }                                                                                                          \
        }                                                                                                              \
    }

static inline void store(const float *sums, float *out, int64_t columns, int add) {
    columns = columns < PANEL ? columns : PANEL;
    for (int64_t c = 0; c < columns; c++) out[c] = add ? out[c] + sums[c] : sums[c];
}

MATMUL(float, float)
MATMUL(bfloat16, uint16_t)

int panel_width(void) { return PANEL; }

#define CHUNK 64

/* logits[rows, n]: the first token at which the cumulative share of 2^(scale (logit - largest)) exceeds the uniform
 * number, and the logarithm of its share. A negative uniform number asks for the largest logit. */
void draw_tokens(const float *logits, const float *scales, const double *uniforms, int64_t *tokens, float *logprobs,
                 int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * n;
        float peak = x[0];
#pragma omp simd reduction(max : peak)
        for (int64_t i = 0; i < n; i++) peak = x[i] > peak ? x[i] : peak;
        double total = 0.0;
        for (int64_t start = 0; start < n; start += CHUNK) {
            int64_t end = start + CHUNK < n ? start + CHUNK : n;
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = start; i < end; i++) part += weight(x[i], peak, scales[row]);
            total += part;
        }
        int64_t token = 0;
        if (uniforms[row] < 0) {
            while (token < n - 1 && x[token] != peak) token++;
        } else {
            double rest = uniforms[row] * total, before = 0.0;
            for (int64_t start = 0; start < n; start += CHUNK) {
                int64_t end = start + CHUNK < n ? start + CHUNK : n;
                float part = 0.0f;
#pragma omp simd reduction(+ : part)
                for (int64_t i = start; i < end; i++) part += weight(x[i], peak, scales[row]);
                if (part > 0) token = end - 1;
                if (before + part > rest) {
                    double sum = before;
                    for (int64_t i = start; i < end && sum <= rest; i++) {
                        float w = weight(x[i], peak, scales[row]);
                        if (w > 0) token = i;
                        sum += w;
                    }
                    break;
                }
                before += part;
            }
        }
        tokens[row] = token;
        logprobs[row] = (float)(((double)(x[token] - peak) * scales[row] - log2(total)) * 0.6931471805599453);
    }
}
