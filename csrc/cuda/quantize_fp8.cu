// float8_e4m3fn with a scale for each group of 128 elements of a row, or for each row, bit for bit as
// kernelhub.ops.quant.reference says:  scale = max(amax / 448, 2^-126);  code = e4m3(x / scale).
//
// Defined by the host: ELEMENT (bf16, f16, float), SIZE of one, UE8M0, E8M0 (scales of one byte).
#include "reduce.h"

typedef ELEMENT T;

#if E8M0
typedef u8 Scale;
#else
typedef float Scale;
#endif

struct Parameters {
  const T* x;
  u8* codes;
  Scale* scale;
  i64 rows, columns;
  i64 x_row, x_column, c_row, c_column, s_row, s_column;
};

constexpr int N = 16 / SIZE;  // elements of a vector
constexpr int GROUP = 128;

INLINE float scale_of(float amax) {
  float scale = larger(amax / E4M3_MAX, LEAST_SCALE);
  return UE8M0 ? power_of_two_above(scale) : scale;
}

INLINE void store(Scale* to, float scale) {
#if E8M0
  *to = (u8)(bits_of(scale) >> 23);
#else
  *to = scale;
#endif
}

INLINE float within(float x) {
  return x > Largest<T>::value ? Largest<T>::value : x < -Largest<T>::value ? -Largest<T>::value : x;
}

// Largest magnitude of M elements in registers; NaN has no part, infinity counts as the largest number.
template <int M> INLINE float magnitude(float (&x)[M]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < M; i++) top = larger(top, fabsf(x[i]));
  return top;
}

template <int M> INLINE void limit(float (&x)[M]) {
#pragma unroll
  for (int i = 0; i < M; i++) x[i] = within(x[i]);
}

INLINE u8 code_of(float x, const Divisor& by) {
  u16 pair = e4m3_pair(by.of(by.lifted ? x * by.lift : x), 0.0f);
  return (u8)pair;
}

template <int M> INLINE void codes_of(float (&x)[M], const Divisor& by, Held<u8, M>& made) {
  if (by.lifted) {
#pragma unroll
    for (int i = 0; i < M; i++) x[i] *= by.lift;
  }
#pragma unroll
  for (int i = 0; i < M; i += 4)
    made.words[i / 4] = e4m3_pair(by.of(x[i]), by.of(x[i + 1])) | (u32)e4m3_pair(by.of(x[i + 2]), by.of(x[i + 3])) << 16;
}

// A group of 128 by lanes that have WIDE vectors of it each. Rows are aligned, and whole vectors long.
template <int WIDE> INLINE void groups_by_vectors(const Parameters& p) {
  follow_launches();
  constexpr int LANES = GROUP / N / WIDE;
  u32 across = (u32)((p.columns + GROUP - 1) / GROUP);
  u32 group = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;  // the host sees to it that this is enough
  u32 row = group / across, of_row = group - row * across, lane = threadIdx.x % LANES;
  u32 columns = row < p.rows ? (u32)p.columns : 0;
  Held<T, N> kept[WIDE] = {};
#pragma unroll
  for (int i = 0; i < WIDE; i++) {
    u32 column = of_row * GROUP + (i * LANES + lane) * N;
    if (column < columns) kept[i] = held<T, N>(p.x + row * p.x_row + column);
  }
  float x[WIDE][N], top = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDE; i++) {
    widen_all(kept[i], x[i]);
    top = larger(top, magnitude(x[i]));
  }
  top = largest_of_lanes<LANES>(top);
  if (top > Largest<T>::value) {
#pragma unroll
    for (int i = 0; i < WIDE; i++) limit(x[i]);
    top = Largest<T>::value;
  }
  float scale = scale_of(top);
  Divisor by(scale);
#pragma unroll
  for (int i = 0; i < WIDE; i++) {
    u32 column = of_row * GROUP + (i * LANES + lane) * N;
    Held<u8, N> made;
    codes_of(x[i], by, made);
    if (column < columns) put<u8, N>(p.codes + row * p.c_row + column, made);
  }
  if (lane == 0 && columns) store(p.scale + row * p.s_row + of_row * p.s_column, scale);
}

extern "C" __global__ void __launch_bounds__(128) groups_by_1(const Parameters p) { groups_by_vectors<1>(p); }
extern "C" __global__ void __launch_bounds__(128) groups_by_2(const Parameters p) { groups_by_vectors<2>(p); }
extern "C" __global__ void __launch_bounds__(128) groups_by_4(const Parameters p) { groups_by_vectors<4>(p); }
EMULATED(groups_by_1, Parameters)
EMULATED(groups_by_2, Parameters)
EMULATED(groups_by_4, Parameters)

// A group by a warp, any strides.
extern "C" __global__ void __launch_bounds__(256) groups_by_elements(const Parameters p) {
  follow_launches();
  constexpr int OF_LANE = GROUP / WARP;
  i64 across = (p.columns + GROUP - 1) / GROUP;
  i64 group = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
  i64 row = group / across, of_row = group % across;
  if (row >= p.rows) return;  // all lanes of a warp have the same
  int lane = threadIdx.x % WARP;
  float x[OF_LANE] = {};
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    i64 column = of_row * GROUP + i * WARP + lane;
    if (column < p.columns) x[i] = within(widened(p.x[row * p.x_row + column * p.x_column]));
  }
  float scale = scale_of(largest_of_lanes<WARP>(magnitude(x)));
  Divisor by(scale);
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    i64 column = of_row * GROUP + i * WARP + lane;
    if (column < p.columns) p.codes[row * p.c_row + column * p.c_column] = code_of(x[i], by);
  }
  if (lane == 0) store(p.scale + row * p.s_row + of_row * p.s_column, scale);
}
EMULATED(groups_by_elements, Parameters)

// A row by a block that keeps it in registers, KEPT vectors a thread.
template <int KEPT> INLINE void row_by_vectors(const Parameters& p) {
  follow_launches();
  __shared__ float room[WARP];
  i64 row = blockIdx.x;
  Held<T, N> kept[KEPT] = {};
  float x[KEPT][N];
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    i64 column = ((i64)i * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) kept[i] = held<T, N>(p.x + row * p.x_row + column);
  }
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    widen_all(kept[i], x[i]);
    top = larger(top, magnitude(x[i]));
  }
  top = largest_of_block(top, room);
  if (top > Largest<T>::value) {
#pragma unroll
    for (int i = 0; i < KEPT; i++) limit(x[i]);
    top = Largest<T>::value;
  }
  float scale = scale_of(top);
  Divisor by(scale);
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    i64 column = ((i64)i * blockDim.x + threadIdx.x) * N;
    Held<u8, N> made;
    codes_of(x[i], by, made);
    if (column < p.columns) put<u8, N>(p.codes + row * p.c_row + column, made);
  }
  if (threadIdx.x == 0) store(p.scale + row * p.s_row, scale);
}

extern "C" __global__ void __launch_bounds__(1024) row_of_1(const Parameters p) { row_by_vectors<1>(p); }
extern "C" __global__ void __launch_bounds__(256) row_of_2(const Parameters p) { row_by_vectors<2>(p); }
extern "C" __global__ void __launch_bounds__(512) row_of_4(const Parameters p) { row_by_vectors<4>(p); }
EMULATED(row_of_1, Parameters)
EMULATED(row_of_2, Parameters)
EMULATED(row_of_4, Parameters)

// A row by a block that reads it twice, any strides and widths.
extern "C" __global__ void __launch_bounds__(1024) row_by_elements(const Parameters p) {
  follow_launches();
  __shared__ float room[WARP];
  i64 row = blockIdx.x;
  float top = 0.0f;
  for (i64 column = threadIdx.x; column < p.columns; column += blockDim.x)
    top = larger(top, fabsf(within(widened(p.x[row * p.x_row + column * p.x_column]))));
  float scale = scale_of(largest_of_block(top, room));
  Divisor by(scale);
  for (i64 column = threadIdx.x; column < p.columns; column += blockDim.x)
    p.codes[row * p.c_row + column * p.c_column] = code_of(within(widened(p.x[row * p.x_row + column * p.x_column])), by);
  if (threadIdx.x == 0) store(p.scale + row * p.s_row, scale);
}
EMULATED(row_by_elements, Parameters)
