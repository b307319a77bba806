// What the native kernels share: bf16 <-> fp32 in registers, exp2, and one small matrix product.
//
// Built with -march=native; every kernel needs AVX-512 (F, BW, VL, DQ, BF16), and products use AMX
// where the processor has it. The Python side checks the processor before it builds, and verifies
// each kernel against its reference before it is used.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

// Elements below which waking the other threads costs more than they save.
constexpr int64_t WORTH_THREADS = 1 << 15;

static inline __m512 load_bf16(const bf16 *p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void store_bf16(bf16 *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

// The first n (1..16) elements; the others read as zero and are not written.
static inline __m512 load_bf16_part(const bf16 *p, int n) {
  __m256i bits = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline void store_bf16_part(bf16 *p, __m512 x, int n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)_mm512_cvtneps_pbh(x));
}

// Rows b above a: 32-bit elements (a[i], b[i]), the pairs along the summed dimension that vdpbf16ps wants.
static inline __m512i pair_bf16(__m512 a, __m512 b) {
  __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
  __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 2^x for x <= 0 (and -inf), relative error below 3e-6: far below what bf16 keeps.
static inline __m512 exp2_nonpositive(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.3390923e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6180256e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

// Transposes 16x16 32-bit elements in registers.
static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Transposes rows x columns 32-bit elements, both multiples of 16.
static inline void transpose32(const uint32_t *from, int from_stride, uint32_t *to, int to_stride,
                               int rows, int columns) {
  for (int i = 0; i < rows; i += 16)
    for (int j = 0; j < columns; j += 16) {
      __m512i r[16];
      for (int k = 0; k < 16; k++) r[k] = _mm512_loadu_si512(from + (i + k) * from_stride + j);
      transpose16(r);
      for (int k = 0; k < 16; k++) _mm512_storeu_si512(to + (j + k) * to_stride + i, r[k]);
    }
}

static inline void *aligned_buffer(size_t bytes) {
  return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

#ifdef __AVX512BF16__
// C[m, n] (+)= A[m, k] B[k, n] in fp32, for an m x 16*N tile of C held in registers.
// A: bf16 rows. B: pairs along k, i.e. B[k / 2][n][2]. Strides in elements (A, C) and in pairs (B).
template <int M, int N, bool ADD>
static inline void tile_product(int k, const bf16 *a, int a_stride, const uint32_t *b, int b_stride,
                                float *c, int c_stride) {
  __m512 sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
      sum[i][j] = ADD ? _mm512_loadu_ps(c + i * c_stride + 16 * j) : _mm512_setzero_ps();
  for (int p = 0; p < k / 2; p++) {
    __m512bh column[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
      column[j] = (__m512bh)_mm512_loadu_si512(b + p * b_stride + 16 * j);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      int32_t two;
      memcpy(&two, a + i * a_stride + 2 * p, 4);
      __m512bh row = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], row, column[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) _mm512_storeu_ps(c + i * c_stride + 16 * j, sum[i][j]);
}

#if defined(__AMX_BF16__) || defined(EMULATE_AMX)
#define WITH_AMX 1
#ifdef EMULATE_AMX
#include "amx_emulated.h"  // for tests on processors without it
#else
#include <sys/syscall.h>
#include <unistd.h>
// Linux hands out the tile registers on request; a refusal leaves the vector path.
static inline bool request_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif
static const bool HAVE_TILES = request_tiles();

// A thread's tile registers, configured while this lives: eight of 16 rows of 64 bytes.
struct Tiles {
  Tiles() {
    if (!HAVE_TILES) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (HAVE_TILES) _tile_release();
  }
};

// The product in AMX tiles; m, n and k are multiples of 32. `pairs along k` is AMX's own layout too.
template <bool ADD>
static inline void tiles_product(int m, int n, int k, const bf16 *a, int a_stride, const uint32_t *b,
                                 int b_stride, float *c, int c_stride) {
  size_t a_bytes = a_stride * sizeof(bf16), b_bytes = b_stride * 4, c_bytes = c_stride * 4;
  for (int i = 0; i < m; i += 32)
    for (int j = 0; j < n; j += 32) {
      float *c0 = c + i * c_stride + j, *c2 = c0 + 16 * c_stride;
      if (ADD) {
        _tile_loadd(0, c0, c_bytes);
        _tile_loadd(1, c0 + 16, c_bytes);
        _tile_loadd(2, c2, c_bytes);
        _tile_loadd(3, c2 + 16, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int p = 0; p < k; p += 32) {
        const bf16 *a0 = a + i * a_stride + p;
        const uint32_t *b0 = b + p / 2 * b_stride + j;
        _tile_loadd(4, a0, a_bytes);
        _tile_loadd(5, a0 + 16 * a_stride, a_bytes);
        _tile_loadd(6, b0, b_bytes);
        _tile_loadd(7, b0 + 16, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, c_bytes);
      _tile_stored(1, c0 + 16, c_bytes);
      _tile_stored(2, c2, c_bytes);
      _tile_stored(3, c2 + 16, c_bytes);
    }
}
#else
struct Tiles {
  ~Tiles() {}  // so that an unused one is no warning
};
#endif

// The same for any m that is a multiple of 4 and n that is a multiple of 16.
template <bool ADD>
static inline void small_product(int m, int n, int k, const bf16 *a, int a_stride, const uint32_t *b,
                                 int b_stride, float *c, int c_stride) {
#ifdef WITH_AMX
  if (HAVE_TILES && (m | n | k) % 32 == 0) {
    tiles_product<ADD>(m, n, k, a, a_stride, b, b_stride, c, c_stride);
    return;
  }
#endif
  int j = 0;
  for (; j + 64 <= n; j += 64)
    for (int i = 0; i < m; i += 4)
      tile_product<4, 4, ADD>(k, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride);
  for (; j < n; j += 16)
    for (int i = 0; i < m; i += 4)
      tile_product<4, 1, ADD>(k, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride);
}
#endif
