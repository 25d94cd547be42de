// Scales of rows [rows, columns] of any strides, to be read down the columns by TMA: to [columns, rows], rows side by side.
#include "formats.h"

constexpr int EACH = 8;  // of a row, by a thread: 32 bytes where they are side by side

struct Parameters {
  const float* from;
  float* to;
  i64 rows, columns, s_row, s_column, t_column;
};

extern "C" __global__ void __launch_bounds__(128) turn_scales(const Parameters p) {
  follow_launches();
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x, part = at / p.rows, row = at - part * p.rows, first = part * EACH;
  float got[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (first + i < p.columns) got[i] = p.from[row * p.s_row + (first + i) * p.s_column];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (first + i < p.columns) p.to[(first + i) * p.t_column + row] = got[i];
}
EMULATED(turn_scales, Parameters)
