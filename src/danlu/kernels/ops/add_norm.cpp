// Residual addition and RMSNorm in one pass, forward and backward, for bf16 rows.

#include "simd.h"

#include <math.h>
#include <omp.h>

static inline int part(int width, int i) { return width - i < 16 ? width - i : 16; }

// x, branch [rows, width] (branch may be null), weight [width] -> sum = x + branch (rounded to bf16; may be null when branch
// is), normed = sum / rms(sum) * weight, inverse [rows] = 1 / rms.
extern "C" void add_norm_forward(const bf16 *x, const bf16 *branch, const float *weight, bf16 *sum, bf16 *normed,
                                 float *inverse, int64_t rows, int width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
  for (int64_t r = 0; r < rows; r++) {
    const bf16 *source = x + r * width;
    __m512 squares = _mm512_setzero_ps();
    if (branch) {
      for (int i = 0; i < width; i += 16) {
        int n = part(width, i);
        __m512 s = _mm512_add_ps(load_bf16_part(source + i, n), load_bf16_part(branch + r * width + i, n));
        store_bf16_part(sum + r * width + i, s, n);
        s = load_bf16_part(sum + r * width + i, n);  // what backward will read
        squares = _mm512_fmadd_ps(s, s, squares);
      }
      source = sum + r * width;
    } else {
      for (int i = 0; i < width; i += 16) {
        __m512 s = load_bf16_part(source + i, part(width, i));
        squares = _mm512_fmadd_ps(s, s, squares);
      }
    }
    float factor = 1.f / sqrtf(_mm512_reduce_add_ps(squares) / width + epsilon);
    inverse[r] = factor;
    __m512 f = _mm512_set1_ps(factor);
    for (int i = 0; i < width; i += 16) {
      int n = part(width, i);
      __m512 w = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), weight + i);
      __m512 s = load_bf16_part(source + i, n);
      store_bf16_part(normed + r * width + i, _mm512_mul_ps(_mm512_mul_ps(s, f), w), n);
    }
  }
}

// grad_normed, grad_sum (may be null), sum, weight, inverse -> dx (the gradient of x and of branch alike),
// dweight [threads, width], to be added up over threads.
extern "C" void add_norm_backward(const bf16 *grad_normed, const bf16 *grad_sum, const bf16 *sum, const float *weight,
                                  const float *inverse, bf16 *dx, float *dweight, int64_t rows, int width) {
#pragma omp parallel if (rows * width > WORTH_THREADS)
  {
    float *partial = dweight + (int64_t)omp_get_thread_num() * width;
    memset(partial, 0, (size_t)width * sizeof(float));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      const bf16 *g = grad_normed + r * width, *s = sum + r * width;
      __m512 dots = _mm512_setzero_ps(), f = _mm512_set1_ps(inverse[r]);
      for (int i = 0; i < width; i += 16) {
        int n = part(width, i);
        __mmask16 mask = (__mmask16)((1u << n) - 1);
        __m512 gs = _mm512_mul_ps(load_bf16_part(g + i, n), load_bf16_part(s + i, n));
        dots = _mm512_fmadd_ps(gs, _mm512_maskz_loadu_ps(mask, weight + i), dots);
        _mm512_mask_storeu_ps(partial + i, mask, _mm512_fmadd_ps(gs, f, _mm512_maskz_loadu_ps(mask, partial + i)));
      }
      float dot = _mm512_reduce_add_ps(dots);
      __m512 pull = _mm512_set1_ps(dot * inverse[r] * inverse[r] / width);
      for (int i = 0; i < width; i += 16) {
        int n = part(width, i);
        __m512 w = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), weight + i);
        __m512 own = _mm512_mul_ps(load_bf16_part(g + i, n), w);
        own = _mm512_mul_ps(f, _mm512_fnmadd_ps(load_bf16_part(s + i, n), pull, own));
        if (grad_sum) own = _mm512_add_ps(own, load_bf16_part(grad_sum + r * width + i, n));
        store_bf16_part(dx + r * width + i, own, n);
      }
    }
  }
}
