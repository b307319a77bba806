// The AMX instructions that the kernels use, in plain C++, after Intel's architecture manual (volume
// 2, TDPBF16PS): for testing the tile code on processors without AMX. Not for use: very slow.

#pragma once

#include <stdint.h>
#include <string.h>

namespace emulated {
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
thread_local Config config;
thread_local uint8_t tile[8][16][64];

inline void load(int t, const void *base, size_t stride) {
  for (int r = 0; r < config.rows[t]; r++)
    memcpy(tile[t][r], (const uint8_t *)base + r * stride, config.row_bytes[t]);
}
inline void store(int t, void *base, size_t stride) {
  for (int r = 0; r < config.rows[t]; r++)
    memcpy((uint8_t *)base + r * stride, tile[t][r], config.row_bytes[t]);
}
inline float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// C[m][n] += A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1]
inline long products = 0;
inline void dpbf16ps(int c, int a, int b) {
#pragma omp atomic
  products++;
  for (int m = 0; m < config.rows[c]; m++)
    for (int k = 0; k < config.row_bytes[a] / 4; k++)
      for (int n = 0; n < config.row_bytes[c] / 4; n++) {
        float *sum = (float *)tile[c][m] + n;
        const uint16_t *x = (const uint16_t *)tile[a][m] + 2 * k;
        const uint16_t *y = (const uint16_t *)tile[b][k] + 2 * n;
        *sum += widen(x[0]) * widen(y[0]) + widen(x[1]) * widen(y[1]);
      }
}
}  // namespace emulated

extern "C" long emulated_products() { return emulated::products; }

static inline bool request_tiles() { return true; }
#define _tile_loadconfig(p) memcpy(&emulated::config, p, sizeof(emulated::config))
#define _tile_release() memset(&emulated::config, 0, sizeof(emulated::config))
#define _tile_zero(t) memset(emulated::tile[t], 0, sizeof(emulated::tile[t]))
#define _tile_loadd(t, p, s) emulated::load(t, p, s)
#define _tile_stored(t, p, s) emulated::store(t, p, s)
#define _tile_dpbf16ps(c, a, b) emulated::dpbf16ps(c, a, b)
