// Causal attention with rotary positions, forward and backward, for bf16 on AVX512-BF16.
//
// The algorithm is FlashAttention's (arXiv 2205.14135, 2307.08691): blocks of queries against blocks of keys, softmax kept
// running, nothing of size T x T stored. Laid out for CPU vectors: scores are computed transposed, S^T = K Q^T, so that one
// vector holds 16 queries and every maximum, sum and rescaling of the softmax is an element-wise operation; P^T and dS^T then
// are already in the form that the next products want. Rotation of q and k happens while they are packed.
//
// q, k, v are read from one buffer [B, T, heads + 2 * kv_heads, D]; gradients are written to one of the same form.

#include "simd.h"

#include <math.h>
#include <omp.h>

namespace {

constexpr int BLOCK = 64;  // queries and keys of a block

struct Shape {
  int batch, length, heads, kv_heads, size;  // size: of a head, a multiple of 16
  int padded() const { return (length + BLOCK - 1) / BLOCK * BLOCK; }
  int64_t row() const { return (int64_t)(heads + 2 * kv_heads) * size; }
};

inline int smaller(int a, int b) { return a < b ? a : b; }

// Rotates one head's vector (halves x1, x2) by its position's angles: (x1 c - x2 s, x2 c + x1 s).
inline void rotate(const bf16 *x, const float *cosine, const float *sine, float scale, bf16 *out, int size) {
  int half = size / 2;
  __m512 factor = _mm512_set1_ps(scale);
  for (int d = 0; d < half; d += 16) {
    int n = smaller(16, half - d);
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    __m512 x1 = load_bf16_part(x + d, n), x2 = load_bf16_part(x + half + d, n);
    __m512 c = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, cosine + d), factor);
    __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sine + d), factor);
    store_bf16_part(out + d, _mm512_fmsub_ps(x1, c, _mm512_mul_ps(x2, s)), n);
    store_bf16_part(out + half + d, _mm512_fmadd_ps(x2, c, _mm512_mul_ps(x1, s)), n);
  }
}

// The gradient of rotate: the same by the opposite angle, from fp32 to bf16.
inline void rotate_back(const float *x, const float *cosine, const float *sine, float scale, bf16 *out, int size) {
  int half = size / 2;
  __m512 factor = _mm512_set1_ps(scale);
  for (int d = 0; d < half; d += 16) {
    int n = smaller(16, half - d);
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    __m512 x1 = _mm512_maskz_loadu_ps(mask, x + d), x2 = _mm512_maskz_loadu_ps(mask, x + half + d);
    __m512 c = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, cosine + d), factor);
    __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sine + d), factor);
    store_bf16_part(out + d, _mm512_fmadd_ps(x1, c, _mm512_mul_ps(x2, s)), n);
    store_bf16_part(out + half + d, _mm512_fmsub_ps(x2, c, _mm512_mul_ps(x1, s)), n);
  }
}

// rows [padded, size] bf16 -> pairs along size: [size / 2][padded][2]; what vdpbf16ps wants when size is summed over.
void pairs_along_size(const bf16 *rows, uint32_t *out, int padded, int size) {
  if (size % 32 == 0) {
    transpose32((const uint32_t *)rows, size / 2, out, padded, padded, size / 2);
    return;
  }
  const uint32_t *from = (const uint32_t *)rows;
  for (int t = 0; t < padded; t++)
    for (int p = 0; p < size / 2; p++) out[p * padded + t] = from[t * (size / 2) + p];
}

// rows [padded, size] bf16 -> pairs along positions: [padded / 2][size][2].
void pairs_along_positions(const bf16 *rows, uint32_t *out, int padded, int size) {
  for (int t = 0; t < padded; t += 2)
    for (int d = 0; d < size; d += 16) {
      __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + t * size + d)));
      __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + (t + 1) * size + d)));
      _mm512_storeu_si512(out + (t / 2) * size + d, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
}

// rows [padded, size] bf16 -> its transpose [size, padded].
void transposed(const bf16 *rows, bf16 *out, uint32_t *scratch, int padded, int size) {
  pairs_along_positions(rows, scratch, padded, size);  // 32-bit elements (t, t + 1) of each column
  if (padded % 32 == 0 && size % 16 == 0) {
    transpose32(scratch, size, (uint32_t *)out, padded / 2, padded / 2, size);
    return;
  }
  for (int d = 0; d < size; d++)
    for (int t = 0; t < padded / 2; t++) ((uint32_t *)out)[d * (padded / 2) + t] = scratch[t * size + d];
}

// What a query may see: keys from `first` (of its own document, or 0) to itself.
struct Mask {
  const int32_t *starts;  // [T] or null
  int length;

  int first(int query) const { return starts ? starts[smaller(query, length - 1)] : 0; }

  // Whether some pair of the block is forbidden.
  bool partial(int query, int key) const { return key == query || first(query + BLOCK - 1) > key; }

  // -inf where key > query or key < first(query); queries are the lanes.
  __m512 apply(__m512 score, int key, int query) const {
    __m512i lane = _mm512_add_epi32(_mm512_set1_epi32(query),
                                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m512i k = _mm512_set1_epi32(key);
    __mmask16 hidden = _mm512_cmpgt_epi32_mask(k, lane);
    if (starts) {
      int n = length - query;
      __mmask16 inside = n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
      hidden |= _mm512_mask_cmplt_epi32_mask(inside, k, _mm512_maskz_loadu_epi32(inside, starts + query));
    }
    return _mm512_mask_mov_ps(score, hidden, _mm512_set1_ps(-INFINITY));
  }
};

// The online softmax of one block: scores [keys][queries] -> P^T as pairs along keys; updates maximum and sum, and scales
// the running output [size][queries] to the new maximum.
void softmax_block(float *scores, const Mask &mask, int query, int key, float *maximum, float *sum, uint32_t *pairs,
                   float *output, int size) {
  bool partial = mask.partial(query, key);
  for (int q = 0; q < BLOCK; q += 16) {
    __m512 old = _mm512_loadu_ps(maximum + q), top = old;
    for (int k = 0; k < BLOCK; k++) {
      __m512 s = _mm512_loadu_ps(scores + k * BLOCK + q);
      if (partial) {
        s = mask.apply(s, key + k, query + q);
        _mm512_storeu_ps(scores + k * BLOCK + q, s);
      }
      top = _mm512_max_ps(top, s);
    }
    // A query that has seen nothing yet keeps a finite reference, so that -inf minus it is -inf, not NaN.
    __m512 reference = _mm512_max_ps(top, _mm512_set1_ps(-1e30f));
    __m512 shrink = exp2_nonpositive(_mm512_sub_ps(old, reference));
    __m512 total = _mm512_mul_ps(_mm512_loadu_ps(sum + q), shrink);
    for (int k = 0; k < BLOCK; k += 2) {
      __m512 even = exp2_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(scores + k * BLOCK + q), reference));
      __m512 odd = exp2_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(scores + (k + 1) * BLOCK + q), reference));
      total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
      _mm512_storeu_si512(pairs + (k / 2) * BLOCK + q, pair_bf16(even, odd));
    }
    _mm512_storeu_ps(maximum + q, top);
    _mm512_storeu_ps(sum + q, total);
    for (int d = 0; d < size; d++)
      _mm512_storeu_ps(output + d * BLOCK + q, _mm512_mul_ps(shrink, _mm512_loadu_ps(output + d * BLOCK + q)));
  }
}

// One head's packed copies.
struct Packed {
  bf16 *rows;  // [padded, size]

  void load(const bf16 *from, int64_t stride, const Shape &s, const float *cosine, const float *sine, float scale) {
    for (int t = 0; t < s.length; t++) {
      if (cosine)
        rotate(from + t * stride, cosine + t * (s.size / 2), sine + t * (s.size / 2), scale, rows + t * s.size, s.size);
      else
        memcpy(rows + t * s.size, from + t * stride, s.size * sizeof(bf16));
    }
    memset(rows + s.length * s.size, 0, (size_t)(s.padded() - s.length) * s.size * sizeof(bf16));
  }
};

// output [size][queries] / sum -> rows of bf16.
void write_output(const float *output, const float *sum, bf16 *to, int64_t stride, int queries, int size) {
  float scaled[BLOCK * 16], turned[16 * BLOCK];
  for (int d = 0; d < size; d += 16) {
    for (int q = 0; q < BLOCK; q += 16) {
      __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_max_ps(_mm512_loadu_ps(sum + q), _mm512_set1_ps(1e-30f)));
      for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(scaled + i * BLOCK + q, _mm512_mul_ps(inverse, _mm512_loadu_ps(output + (d + i) * BLOCK + q)));
    }
    transpose32((const uint32_t *)scaled, BLOCK, (uint32_t *)turned, 16, 16, BLOCK);
    for (int q = 0; q < queries; q++) store_bf16(to + q * stride + d, _mm512_loadu_ps(turned + q * 16));
  }
}

}  // namespace

// qkv [B, T, heads + 2 kv_heads, D], cosine and sine [T, D / 2], starts [B, T] or null
// -> out [B, T, heads, D], lse [B, heads, T] (log2 of the sum of exponentials of scaled scores).
extern "C" void attention_forward(const bf16 *qkv, const float *cosine, const float *sine, const int32_t *starts,
                                  bf16 *out, float *lse, int batch, int length, int heads, int kv_heads, int size) {
  Shape s{batch, length, heads, kv_heads, size};
  int padded = s.padded(), group = heads / kv_heads;
  int64_t row = s.row(), out_row = (int64_t)heads * size;
  float scale = 1.44269504f / sqrtf((float)size);
#pragma omp parallel if ((int64_t)batch * length * heads * size > WORTH_THREADS)
  {
    Tiles tiles;
    size_t plane = (size_t)padded * size;
    bf16 *query = (bf16 *)aligned_buffer(plane * 2), *key = (bf16 *)aligned_buffer(plane * 2);
    bf16 *value = (bf16 *)aligned_buffer(plane * 2), *value_t = (bf16 *)aligned_buffer(plane * 2);
    uint32_t *query_pairs = (uint32_t *)aligned_buffer(plane * 2);
    uint32_t *scratch = (uint32_t *)aligned_buffer(plane * 2);
    float *output = (float *)aligned_buffer((size_t)BLOCK * size * 4);
    alignas(64) float scores[BLOCK * BLOCK], maximum[BLOCK], sum[BLOCK];
    alignas(64) uint32_t pairs[BLOCK / 2 * BLOCK];
#pragma omp for collapse(2) schedule(static)
    for (int b = 0; b < batch; b++)
      for (int h = 0; h < heads; h++) {
        const bf16 *base = qkv + (int64_t)b * length * row;
        int kv = h / group;
        Packed{query}.load(base + (int64_t)h * size, row, s, cosine, sine, scale);
        Packed{key}.load(base + (int64_t)(heads + kv) * size, row, s, cosine, sine, 1.f);
        Packed{value}.load(base + (int64_t)(heads + kv_heads + kv) * size, row, s, nullptr, nullptr, 1.f);
        pairs_along_size(query, query_pairs, padded, size);
        transposed(value, value_t, scratch, padded, size);
        Mask mask{starts ? starts + (int64_t)b * length : nullptr, length};
        for (int i = 0; i < padded; i += BLOCK) {
          memset(output, 0, (size_t)BLOCK * size * 4);
          for (int q = 0; q < BLOCK; q++) maximum[q] = -INFINITY, sum[q] = 0;
          for (int j = mask.first(i) / BLOCK * BLOCK; j <= i; j += BLOCK) {
            small_product<false>(BLOCK, BLOCK, size, key + j * size, size, query_pairs + i, padded, scores, BLOCK);
            softmax_block(scores, mask, i, j, maximum, sum, pairs, output, size);
            small_product<true>(size, BLOCK, BLOCK, value_t + j, padded, pairs, BLOCK, output, BLOCK);
          }
          int queries = smaller(BLOCK, length - i);
          write_output(output, sum, out + ((int64_t)b * length + i) * out_row + (int64_t)h * size, out_row, queries, size);
          for (int q = 0; q < queries; q++)
            lse[((int64_t)b * heads + h) * length + i + q] = maximum[q] + log2f(sum[q]);
        }
      }
    free(query), free(key), free(value), free(value_t), free(query_pairs), free(scratch), free(output);
  }
}

namespace {

// scores S^T and dP^T of one block [keys][queries] -> P^T and dS^T as rows (bf16) and dS^T as pairs along keys.
void gradient_block(const float *scores, const float *dp, const Mask &mask, int query, int key, const float *lse,
                    const float *delta, bf16 *p, bf16 *ds, uint32_t *ds_pairs) {
  bool partial = mask.partial(query, key);
  for (int q = 0; q < BLOCK; q += 16) {
    __m512 l = _mm512_loadu_ps(lse + q), d = _mm512_loadu_ps(delta + q);
    for (int k = 0; k < BLOCK; k += 2) {
      __m512 row[2];
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++) {
        __m512 s = _mm512_loadu_ps(scores + (k + r) * BLOCK + q);
        if (partial) s = mask.apply(s, key + k + r, query + q);
        __m512 prob = exp2_nonpositive(_mm512_min_ps(_mm512_sub_ps(s, l), _mm512_setzero_ps()));
        row[r] = _mm512_mul_ps(prob, _mm512_sub_ps(_mm512_loadu_ps(dp + (k + r) * BLOCK + q), d));
        store_bf16(p + (k + r) * BLOCK + q, prob);
        store_bf16(ds + (k + r) * BLOCK + q, row[r]);
      }
      _mm512_storeu_si512(ds_pairs + (k / 2) * BLOCK + q, pair_bf16(row[0], row[1]));
    }
  }
}

// sum over d of out * grad, for each position: the softmax's own gradient term.
void row_dots(const bf16 *a, const bf16 *b, int64_t stride, float *out, const Shape &s) {
  for (int t = 0; t < s.length; t++) {
    __m512 sum = _mm512_setzero_ps();
    for (int d = 0; d < s.size; d += 16)
      sum = _mm512_fmadd_ps(load_bf16(a + t * stride + d), load_bf16(b + t * stride + d), sum);
    out[t] = _mm512_reduce_add_ps(sum);
  }
  for (int t = s.length; t < s.padded(); t++) out[t] = 0;
}

}  // namespace

// The gradients of attention_forward: grad and out [B, T, heads, D] -> dqkv, of qkv's form.
extern "C" void attention_backward(const bf16 *grad, const bf16 *qkv, const bf16 *out, const float *lse,
                                   const float *cosine, const float *sine, const int32_t *starts, bf16 *dqkv,
                                   int batch, int length, int heads, int kv_heads, int size) {
  Shape s{batch, length, heads, kv_heads, size};
  int padded = s.padded(), group = heads / kv_heads;
  int64_t row = s.row(), out_row = (int64_t)heads * size;
  float scale = 1.f / sqrtf((float)size);
#pragma omp parallel if ((int64_t)batch * length * heads * size > WORTH_THREADS)
  {
    Tiles tiles;
    size_t plane = (size_t)padded * size;
    bf16 *query = (bf16 *)aligned_buffer(plane * 2), *key = (bf16 *)aligned_buffer(plane * 2);
    bf16 *value = (bf16 *)aligned_buffer(plane * 2), *dout = (bf16 *)aligned_buffer(plane * 2);
    bf16 *key_t = (bf16 *)aligned_buffer(plane * 2);
    uint32_t *query_by_size = (uint32_t *)aligned_buffer(plane * 2), *query_by_time = (uint32_t *)aligned_buffer(plane * 2);
    uint32_t *dout_by_size = (uint32_t *)aligned_buffer(plane * 2), *dout_by_time = (uint32_t *)aligned_buffer(plane * 2);
    uint32_t *scratch = (uint32_t *)aligned_buffer(plane * 2);
    float *dq_t = (float *)aligned_buffer(plane * 4), *dk = (float *)aligned_buffer(plane * 4);
    float *dv = (float *)aligned_buffer(plane * 4), *turned = (float *)aligned_buffer(plane * 4);
    float *row_lse = (float *)aligned_buffer((size_t)padded * 4), *delta = (float *)aligned_buffer((size_t)padded * 4);
    alignas(64) float scores[BLOCK * BLOCK], dp[BLOCK * BLOCK];
    alignas(64) bf16 p[BLOCK * BLOCK], ds[BLOCK * BLOCK];
    alignas(64) uint32_t ds_pairs[BLOCK / 2 * BLOCK];
#pragma omp for collapse(2) schedule(static)
    for (int b = 0; b < batch; b++)
      for (int kv = 0; kv < kv_heads; kv++) {
        const bf16 *base = qkv + (int64_t)b * length * row;
        bf16 *dbase = dqkv + (int64_t)b * length * row;
        Packed{key}.load(base + (int64_t)(heads + kv) * size, row, s, cosine, sine, 1.f);
        Packed{value}.load(base + (int64_t)(heads + kv_heads + kv) * size, row, s, nullptr, nullptr, 1.f);
        transposed(key, key_t, scratch, padded, size);
        memset(dk, 0, plane * 4), memset(dv, 0, plane * 4);
        Mask mask{starts ? starts + (int64_t)b * length : nullptr, length};
        for (int h = kv * group; h < (kv + 1) * group; h++) {
          const bf16 *g = grad + (int64_t)b * length * out_row + (int64_t)h * size;
          Packed{query}.load(base + (int64_t)h * size, row, s, cosine, sine, 1.44269504f * scale);
          Packed{dout}.load(g, out_row, s, nullptr, nullptr, 1.f);
          pairs_along_size(query, query_by_size, padded, size), pairs_along_positions(query, query_by_time, padded, size);
          pairs_along_size(dout, dout_by_size, padded, size), pairs_along_positions(dout, dout_by_time, padded, size);
          row_dots(out + (int64_t)b * length * out_row + (int64_t)h * size, g, out_row, delta, s);
          for (int t = 0; t < padded; t++)
            row_lse[t] = t < length ? lse[((int64_t)b * heads + h) * length + t] : INFINITY;
          memset(dq_t, 0, plane * 4);
          for (int j = 0; j < padded; j += BLOCK)
            for (int i = j; i < padded; i += BLOCK) {
              if (mask.first(i) >= j + BLOCK) break;  // later queries start later still
              small_product<false>(BLOCK, BLOCK, size, key + j * size, size, query_by_size + i, padded, scores, BLOCK);
              small_product<false>(BLOCK, BLOCK, size, value + j * size, size, dout_by_size + i, padded, dp, BLOCK);
              gradient_block(scores, dp, mask, i, j, row_lse + i, delta + i, p, ds, ds_pairs);
              small_product<true>(BLOCK, size, BLOCK, p, BLOCK, dout_by_time + i / 2 * size, size, dv + j * size, size);
              small_product<true>(BLOCK, size, BLOCK, ds, BLOCK, query_by_time + i / 2 * size, size, dk + j * size, size);
              small_product<true>(size, BLOCK, BLOCK, key_t + j, padded, ds_pairs, BLOCK, dq_t + i, padded);
            }
          transpose32((const uint32_t *)dq_t, padded, (uint32_t *)turned, size, size, padded);
          for (int t = 0; t < length; t++)
            rotate_back(turned + t * size, cosine + t * (size / 2), sine + t * (size / 2), scale,
                        dbase + t * row + (int64_t)h * size, size);
        }
        // k met queries that carried scale * log2(e); dividing log2(e) out again leaves d(scaled score)/dk.
        for (int t = 0; t < length; t++) {
          rotate_back(dk + t * size, cosine + t * (size / 2), sine + t * (size / 2), 0.69314718f,
                      dbase + t * row + (int64_t)(heads + kv) * size, size);
          for (int d = 0; d < size; d += 16)
            store_bf16(dbase + t * row + (int64_t)(heads + kv_heads + kv) * size + d, _mm512_loadu_ps(dv + t * size + d));
        }
      }
    free(query), free(key), free(value), free(dout), free(key_t), free(query_by_size), free(query_by_time);
    free(dout_by_size), free(dout_by_time), free(scratch), free(dq_t), free(dk), free(dv), free(turned);
    free(row_lse), free(delta);
  }
}
