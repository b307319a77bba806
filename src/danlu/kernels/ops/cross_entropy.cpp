// Softmax cross-entropy over rows of bf16 logits, whose memory becomes their gradient.

#include "simd.h"

#include <math.h>
#include <omp.h>

static inline int part(int width, int i) { return width - i < 16 ? width - i : 16; }

// logits [rows, width], targets [rows] (negative: ignored) -> loss [rows] in nats; with gradient, logits become
// (softmax - one_hot) * scale.
extern "C" void cross_entropy(bf16 *logits, const int64_t *targets, float *loss, int64_t rows, int width, float scale,
                              int gradient) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f);
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
  for (int64_t r = 0; r < rows; r++) {
    bf16 *row = logits + r * width;
    int64_t target = targets[r];
    if (target < 0) {
      loss[r] = 0;
      if (gradient) memset(row, 0, (size_t)width * sizeof(bf16));
      continue;
    }
    __m512 tops = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    int i = 0;
    for (; i + 16 <= width; i += 16) tops = _mm512_max_ps(tops, load_bf16(row + i));
    float top = _mm512_reduce_max_ps(tops);
    for (; i < width; i++) {
      uint32_t bits = (uint32_t)row[i] << 16;
      float x;
      memcpy(&x, &bits, 4);
      top = x > top ? x : top;
    }
    __m512 reference = _mm512_set1_ps(top * 1.44269504f);
    for (i = 0; i < width; i += 16) {
      int n = part(width, i);
      __m512 e = exp2_nonpositive(_mm512_min_ps(
          _mm512_fmsub_ps(load_bf16_part(row + i, n), log2e, reference), _mm512_setzero_ps()));
      sums = _mm512_mask_add_ps(sums, (__mmask16)((1u << n) - 1), sums, e);
    }
    float sum = _mm512_reduce_add_ps(sums);
    uint32_t bits = (uint32_t)row[target] << 16;
    float at_target;
    memcpy(&at_target, &bits, 4);
    loss[r] = top + logf(sum) - at_target;
    if (!gradient) continue;
    __m512 factor = _mm512_set1_ps(scale / sum);
    for (i = 0; i < width; i += 16) {
      int n = part(width, i);
      __m512 e = exp2_nonpositive(_mm512_min_ps(
          _mm512_fmsub_ps(load_bf16_part(row + i, n), log2e, reference), _mm512_setzero_ps()));
      if (target >= i && target < i + 16)  // before rounding, so that 1 - p keeps its digits
        e = _mm512_mask_sub_ps(e, (__mmask16)(1u << (target - i)), e, _mm512_set1_ps(sum));
      store_bf16_part(row + i, _mm512_mul_ps(e, factor), n);
    }
  }
}
