// SwiGLU, silu(gate) * up, forward and backward, for bf16 rows that hold gate and up side by side.

#include "simd.h"

#include <omp.h>

static inline int part(int width, int i) { return width - i < 16 ? width - i : 16; }

static inline __m512 sigmoid(__m512 x) {
  __m512 t = exp2_nonpositive(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.44269504f)));
  __m512 upper = _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_add_ps(_mm512_set1_ps(1.f), t));
  __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_mul_ps(upper, negative, upper, t);
}

// gate_up [rows, 2 * width] -> out [rows, width]
extern "C" void swiglu_forward(const bf16 *gate_up, bf16 *out, int64_t rows, int width) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
  for (int64_t r = 0; r < rows; r++) {
    const bf16 *gate = gate_up + r * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += 16) {
      int n = part(width, i);
      __m512 g = load_bf16_part(gate + i, n), u = load_bf16_part(up + i, n);
      store_bf16_part(out + r * width + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u), n);
    }
  }
}

// grad [rows, width], gate_up -> dgate_up
extern "C" void swiglu_backward(const bf16 *grad, const bf16 *gate_up, bf16 *dgate_up, int64_t rows, int width) {
  const __m512 one = _mm512_set1_ps(1.f);
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
  for (int64_t r = 0; r < rows; r++) {
    const bf16 *gate = gate_up + r * 2 * width, *up = gate + width;
    bf16 *dgate = dgate_up + r * 2 * width, *dup = dgate + width;
    for (int i = 0; i < width; i += 16) {
      int n = part(width, i);
      __m512 g = load_bf16_part(gate + i, n), u = load_bf16_part(up + i, n), d = load_bf16_part(grad + r * width + i, n);
      __m512 s = sigmoid(g), silu = _mm512_mul_ps(g, s);
      // silu'(g) = s + silu(g) (1 - s)
      __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, s), s);
      store_bf16_part(dgate + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope), n);
      store_bf16_part(dup + i, _mm512_mul_ps(d, silu), n);
    }
  }
}
