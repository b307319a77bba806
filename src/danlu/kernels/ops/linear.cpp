// Transposes a bf16 matrix, 32 x 16 elements at a time in registers.

#include "simd.h"

#include <omp.h>

// from [rows, columns] -> to [columns, rows]
extern "C" void transpose_bf16(const bf16 *from, bf16 *to, int64_t rows, int64_t columns) {
  int64_t whole_rows = rows / 32 * 32, whole_columns = columns / 16 * 16;
#pragma omp parallel for schedule(static) if (rows * columns > WORTH_THREADS)
  for (int64_t c = 0; c < whole_columns; c += 16)
    for (int64_t r = 0; r < whole_rows; r += 32) {
      __m512i block[16];  // pairs of rows: 32-bit elements (from[r][c], from[r + 1][c])
      for (int i = 0; i < 16; i++) {
        const bf16 *even = from + (r + 2 * i) * columns + c;
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)even));
        __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + columns)));
        block[i] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      }
      transpose16(block);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (c + i) * rows + r, block[i]);
    }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; c++) to[c * rows + r] = from[r * columns + c];
}
