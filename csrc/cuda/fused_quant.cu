// RMSNorm with a residual, or SiLU and product, of rows, and their quantisation, as kernelhub.ops.fused_quant says.
//
// LANES threads share a row, or a stretch of CHUNK elements of it where nothing is summed up over the row; each keeps
// EACH vectors in registers. Small rows share a block. A group of 128, 32 or 16 elements is that of neighbouring lanes.
//
// Defined by the host: OPERATION (0 norm, 1 SiLU and product), ELEMENT (bf16, f16, float), SIZE of one, WEIGHT (likewise),
// WIDTH, FORMAT (0 floats, 1 fp8 of the tensor, 2 of the token, 3 of groups, 4 mxfp8, 5 nvfp4), RESIDUAL, UNIT_OFFSET,
// UE8M0, E8M0 (scales of one byte), EACH, LANES, ROWS of a block, CHUNKS of a row, FEW_LANES and FEW_CHUNKS of few rows,
// WIDE (the vectors of a thread are of one group of 128 elements, not of several).
#include "reduce.h"

typedef ELEMENT T;
typedef WEIGHT W;

#if FORMAT == 0
typedef T Stored;
#else
typedef u8 Stored;
#endif
#if FORMAT >= 4 || E8M0
typedef u8 Scale;
#else
typedef float Scale;
#endif

struct Parameters {
  const T* x;
  const W* weight;
  const T* residual;
  const float* given;
  Stored* out;
  Scale* scale;
  T* total;
  i64 rows;
  i64 x_row, x_column, w_column, r_row, r_column, o_row, o_column, s_row, s_column, t_row, t_column;
  float eps;
};

constexpr int N = 16 / SIZE;  // elements of a vector

// How threads share rows.
template <int Each, int Lanes, int Rows, int Chunks> struct Layout {
  static constexpr int each = Each, lanes = Lanes, rows = Rows, chunks = Chunks, chunk = Lanes * Each * N;
  static constexpr int wide = WIDE ? Each : 1, of_group = 128 / N / wide;  // vectors of a group, its lanes

  // The first element of a lane's vector i, from the beginning of the stretch.
  static INLINE_METHOD int column(int i, int lane) {
    return wide == 1 ? (i * lanes + lane) * N : lane / of_group * 128 + (i * of_group + lane % of_group) * N;
  }
};
typedef Layout<EACH, LANES, ROWS, CHUNKS> Many;
typedef Layout<EACH, FEW_LANES, ROWS, FEW_CHUNKS> Few;

template <typename U> INLINE Held<U, N> load(bool vectors, const U* from, i64 step, int column, int columns) {
  Held<U, N> got = {};
  if (vectors) {
    if (column < columns) got = held<U, N>(from + column);
  } else {
    Vector<U, N> made = {};
#pragma unroll
    for (int i = 0; i < N; i++)
      if (column + i < columns) made.at[i] = from[(column + i) * step];
    memcpy(got.words, &made, sizeof made);
  }
  return got;
}

template <typename U> INLINE U element(const Vector<U, N>& of, int i) { return of.at[i]; }
template <typename U> INLINE U element(const Held<U, N>& of, int i) { return of.opened().at[i]; }

template <typename U, typename M> INLINE void store(bool vectors, U* to, i64 step, int column, int columns, const M& made) {
  if (vectors) {
    if (column < columns) put<U, N>(to + column, made);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (column + i < columns) to[(column + i) * step] = element(made, i);
  }
}

INLINE float within(float x) {
  return x > Largest<T>::value ? Largest<T>::value : x < -Largest<T>::value ? -Largest<T>::value : x;
}

INLINE float magnitude(const float (&x)[N]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) top = larger(top, fabsf(x[i]));
  return top;
}

INLINE float fp8_scale_of(float amax) {
  float scale = larger(amax / E4M3_MAX, LEAST_SCALE);
  return UE8M0 ? power_of_two_above(scale) : scale;
}

INLINE void store_fp8_scale(Scale* to, float scale) {
#if FORMAT < 4
#if E8M0
  *to = (u8)(bits_of(scale) >> 23);
#else
  *to = scale;
#endif
#endif
}

template <typename By> INLINE void codes_of(const float (&x)[N], const By& by, Held<u8, N>& made) {
#pragma unroll
  for (int i = 0; i < N; i += 4)
    made.words[i / 4] = e4m3_pair(by(x[i]), by(x[i + 1])) | (u32)e4m3_pair(by(x[i + 2]), by(x[i + 3])) << 16;
}

// Infinity counts as the largest number, which is what `top` becomes: the largest magnitude of these and others.
INLINE void limit(float (&x)[N], float& top) {
  if (top > Largest<T>::value) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = within(x[i]);
    top = Largest<T>::value;
  }
}

// y / (1 + exp(-y)) by what the device approximates: 2^-22 of the result for each of the steps.
INLINE float silu(float y) {
#ifdef KERNELHUB_EMULATED
  return y / (1.0f + expf(-y));
#else
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return y * inverse;
#endif
}

// The largest magnitude as bits over LANES neighbours: NaN is larger than all numbers.
template <int NEIGHBOURS> INLINE u32 largest_bits(const float (&x)[N]) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    u32 bits = bits_of(x[i]) & 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
#pragma unroll
  for (int step = NEIGHBOURS / 2; step; step /= 2) {
    u32 other = bits_of(__shfl_xor_sync(~0u, float_of(top), step));
    top = other > top ? other : top;
  }
  return top;
}

// One vector of a row, `column` its first element.
INLINE void store_vector(bool vectors, const Parameters& p, i64 row, int column, float (&y)[N], float given) {
  Stored* out = p.out + row * p.o_row;
#if FORMAT == 0
  Held<T, N> made;
  narrow_all(y, made);
  store(vectors, out, p.o_column, column, WIDTH, made);
#elif FORMAT == 1
  Held<u8, N> made;
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = within(y[i]);
  codes_of(y, [&](float x) { return x / given; }, made);
  store(vectors, out, p.o_column, column, WIDTH, made);
#elif FORMAT == 3 || FORMAT == 4
  constexpr int GROUP = FORMAT == 3 ? 128 : 32, NEIGHBOURS = GROUP / N;
  float top = largest_of_lanes<NEIGHBOURS>(magnitude(y));
  limit(y, top);
  bool first = threadIdx.x % NEIGHBOURS == 0 && column < WIDTH;
  Scale* to = p.scale + row * p.s_row + column / GROUP * p.s_column;
  Held<u8, N> made;
  if (FORMAT == 3) {
    float scale = fp8_scale_of(top), inverse = 1.0f / scale;
    codes_of(y, [&](float x) { return x * inverse; }, made);
    if (first) store_fp8_scale(to, scale);
  } else {
    int exponent = (int)(bits_of(top) >> 23) - 8;
    exponent = exponent < 0 ? 0 : exponent;
    float inverse = float_of((u32)(254 - exponent) << 23);
    codes_of(y, [&](float x) { return x * inverse; }, made);
#if FORMAT == 4
    if (first) *to = (u8)exponent;
#endif
  }
  store(vectors, out, p.o_column, column, WIDTH, made);
#elif FORMAT == 5
  constexpr int NEIGHBOURS = 16 / N;
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = within(y[i]);
  u32 top = largest_bits<NEIGHBOURS>(y);
  bool lost = top > 0x7F800000;
  float wanted = float_of(top) / E2M1_MAX / given;
  u8 raw = e4m3_by_hand(wanted > LEAST_NVFP4_SCALE ? wanted : LEAST_NVFP4_SCALE);
  float scale = e4m3_value(raw) * given;
  u8 packed[N / 2];
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float low = y[i] / scale, high = y[i + 1] / scale;
    low = low != low ? 0.0f : low;
    high = high != high ? 0.0f : high;
    packed[i / 2] = lost ? 0 : (u8)(e2m1_of(low) | (e2m1_of(high) << 4));
  }
  if (column < WIDTH) {
    if (threadIdx.x % NEIGHBOURS == 0) p.scale[row * p.s_row + column / 16 * p.s_column] = lost ? 0x7F : raw;
#pragma unroll
    for (int i = 0; i < N / 2; i++) out[(column / 2 + i) * p.o_column] = packed[i];
  }
#endif
}

// A row belongs to a warp or to a block.
template <typename L> INLINE float sum_of_row(float x, float* room) {
  if constexpr (L::lanes <= WARP) return sum_of_lanes<L::lanes>(x);
  else return sum_of_block(x, room);
}

template <typename L> INLINE float largest_of_row(float x, float* room) {
  if constexpr (L::lanes <= WARP) return largest_of_lanes<L::lanes>(x);
  else return largest_of_block(x, room);
}

template <typename L> INLINE void run(bool vectors, const Parameters& p) {
  follow_launches();
  constexpr int lanes = L::lanes, each = L::each;
  __shared__ float sums[WARP];
  __shared__ float tops[WARP];
  int lane = threadIdx.x % lanes;
  i64 row = (i64)(blockIdx.x / L::chunks) * L::rows + threadIdx.x / lanes;
  int begin = blockIdx.x % L::chunks * L::chunk;
  bool there = row < p.rows;  // lanes of a row that is not there take part in shuffles
  if (!there) row = 0;
  float y[each][N];
  Held<T, N> kept[each];
#pragma unroll
  for (int i = 0; i < each; i++) kept[i] = load(vectors, p.x + row * p.x_row, p.x_column, begin + L::column(i, lane), WIDTH);
#if OPERATION == 0
  float squares = 0.0f;
#if RESIDUAL
  Held<T, N> more[each];
#pragma unroll
  for (int i = 0; i < each; i++)
    more[i] = load(vectors, p.residual + row * p.r_row, p.r_column, begin + L::column(i, lane), WIDTH);
#endif
  Held<W, N> factors[each];
#pragma unroll
  for (int i = 0; i < each; i++) factors[i] = load(vectors, p.weight, p.w_column, begin + L::column(i, lane), WIDTH);
#pragma unroll
  for (int i = 0; i < each; i++) {
    widen_all(kept[i], y[i]);
#if RESIDUAL
    float other[N];
    widen_all(more[i], other);
#pragma unroll
    for (int j = 0; j < N; j++) y[i][j] += other[j];
    narrow_all(y[i], kept[i]);
    widen_all(kept[i], y[i]);
    if (there) store(vectors, p.total + row * p.t_row, p.t_column, begin + L::column(i, lane), WIDTH, kept[i]);
#endif
#pragma unroll
    for (int j = 0; j < N; j++) squares += y[i][j] * y[i][j];
  }
  float inverse = 1.0f / sqrtf(sum_of_row<L>(squares, sums) * (1.0f / WIDTH) + p.eps);
#pragma unroll
  for (int i = 0; i < each; i++) {
    float factor[N];
    widen_all(factors[i], factor);
#pragma unroll
    for (int j = 0; j < N; j++) y[i][j] = y[i][j] * inverse * (UNIT_OFFSET ? factor[j] + 1.0f : factor[j]);
  }
#else
  Held<T, N> ups[each];
#pragma unroll
  for (int i = 0; i < each; i++)
    ups[i] = load(vectors, p.x + row * p.x_row + WIDTH * p.x_column, p.x_column, begin + L::column(i, lane), WIDTH);
#pragma unroll
  for (int i = 0; i < each; i++) {
    float up[N];
    widen_all(kept[i], y[i]);
    widen_all(ups[i], up);
#pragma unroll
    for (int j = 0; j < N; j++) y[i][j] = silu(y[i][j]) * up[j];
  }
#endif
#if FORMAT == 2
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < each; i++) top = larger(top, magnitude(y[i]));
  top = largest_of_row<L>(top, tops);
  float all = top;
#pragma unroll
  for (int i = 0; i < each; i++) {
    top = all;
    limit(y[i], top);
  }
  if (!there) return;
  float scale = fp8_scale_of(top), by = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < each; i++) {
    Held<u8, N> made;
    codes_of(y[i], [&](float x) { return x * by; }, made);
    store(vectors, p.out + row * p.o_row, p.o_column, begin + L::column(i, lane), WIDTH, made);
  }
  if (lane == 0) store_fp8_scale(p.scale + row * p.s_row, scale);
#elif FORMAT == 3 && WIDE
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < each; i++) top = larger(top, magnitude(y[i]));
  top = largest_of_lanes<L::of_group>(top);
  float all = top;
#pragma unroll
  for (int i = 0; i < each; i++) {
    top = all;
    limit(y[i], top);
  }
  float scale = fp8_scale_of(top), by = 1.0f / scale;
  if (!there) return;
#pragma unroll
  for (int i = 0; i < each; i++) {
    Held<u8, N> made;
    codes_of(y[i], [&](float x) { return x * by; }, made);
    store(vectors, p.out + row * p.o_row, p.o_column, begin + L::column(i, lane), WIDTH, made);
  }
  int first = begin + L::column(0, lane);
  if (lane % L::of_group == 0 && first < WIDTH) store_fp8_scale(p.scale + row * p.s_row + first / 128 * p.s_column, scale);
#else
  float given = FORMAT == 1 || FORMAT == 5 ? *p.given : 1.0f;
#pragma unroll
  for (int i = 0; i < each; i++) {
    // Columns of a row that is not there lie past its end, so that nothing of it is stored.
    int column = there ? begin + L::column(i, lane) : WIDTH;
    store_vector(vectors, p, row, column, y[i], given);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(LANES* ROWS) rows_by_vectors(const Parameters p) { run<Many>(true, p); }
extern "C" __global__ void __launch_bounds__(LANES* ROWS) rows_by_elements(const Parameters p) { run<Many>(false, p); }
EMULATED(rows_by_vectors, Parameters)
EMULATED(rows_by_elements, Parameters)

#if FEW_LANES != LANES
extern "C" __global__ void __launch_bounds__(FEW_LANES* ROWS) few_by_vectors(const Parameters p) { run<Few>(true, p); }
EMULATED(few_by_vectors, Parameters)
#endif
