// Attention over two parts of the keys merged: weights exp(lse - max), results weighted, lse = max + log(sum).
//
// A part whose lse is infinite has no keys; its result is not used. LANES threads of one warp share a row, a head of a
// token: all of them read both lse before one writes the merged one, which may take the place of either.
//
// Defined by the host: ELEMENT (bf16, f16, float), SIZE of one, WIDTH of a head, HEADS, LANES, HAS_LSE, SCALE (of a
// float8_e4m3fn result: 0 none, 1 a number, 2 at an address).
#include "formats.h"

typedef ELEMENT T;
#if SCALE == 0
typedef T Stored;
#else
typedef u8 Stored;
#endif

struct Parameters {
  const T *a, *b;
  Stored* out;
  const float *lse_a, *lse_b;
  float* lse_out;
  const float* scale_at;
  i64 rows, tokens;
  i64 a_batch, a_token, a_head, a_column, b_batch, b_token, b_head, b_column, o_batch, o_token, o_head, o_column;
  i64 la_batch, la_head, la_token, lb_batch, lb_head, lb_token, lo_batch, lo_head, lo_token;
  float scale;
};

INLINE float infinite() { return float_of(0x7F800000); }

INLINE float lse_of(float given) { return given == infinite() ? -infinite() : given; }

// What a part without keys contains may be NaN, and counts as 0.
template <int N> INLINE void weighted(Held<T, N>& of, float weight, float (&x)[N]) {
  if (weight == 0.0f) of = {};
  widen_all(of, x);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= weight;
}

// A thread asks for its first vectors before it uses the lse.
template <int N> INLINE void merge(const Parameters& p) {
  follow_launches();
  i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  int lane = threadIdx.x % LANES;
  bool there = row < p.rows;
  if (!there) row = 0;
  i64 all_tokens = row >> 32 ? row / HEADS : (u32)row / HEADS;  // a division of 64 bits takes far longer
  i64 head = row - all_tokens * HEADS, batch = all_tokens < p.tokens ? 0 : all_tokens / p.tokens;
  i64 token = all_tokens - batch * p.tokens;
  float x = lse_of(p.lse_a[batch * p.la_batch + head * p.la_head + token * p.la_token]);
  float y = lse_of(p.lse_b[batch * p.lb_batch + head * p.lb_head + token * p.lb_token]);
  const T* a = p.a + batch * p.a_batch + token * p.a_token + head * p.a_head;
  const T* b = p.b + batch * p.b_batch + token * p.b_token + head * p.b_head;
  Held<T, N> of_a, of_b;
  auto read = [&](int column) {
    of_a = held<T, N>(a + column * p.a_column);
    of_b = held<T, N>(b + column * p.b_column);
  };
  if (lane * N < WIDTH) read(lane * N);
  float scale = SCALE == 2 ? *p.scale_at : p.scale;
  __syncwarp();
  if (!there) return;
  float top = x != x ? x : y != y ? y : larger(x, y);
  float below = top == -infinite() ? 0.0f : top;
  float weight_x = expf(x - below), weight_y = expf(y - below), total = weight_x + weight_y;
  float share = total == 0.0f ? 0.0f : 1.0f / total;
  if (HAS_LSE && lane == 0)
    p.lse_out[batch * p.lo_batch + head * p.lo_head + token * p.lo_token] = total == 0.0f ? -infinite() : top + logf(total);
  weight_x *= share;
  weight_y *= share;
  Stored* out = p.out + batch * p.o_batch + token * p.o_token + head * p.o_head;
  for (int column = lane * N; column < WIDTH; column += LANES * N) {
    if (column >= LANES * N) read(column);
    float value[N], other[N];
    weighted(of_a, weight_x, value);
    weighted(of_b, weight_y, other);
#pragma unroll
    for (int i = 0; i < N; i++) value[i] += other[i];
#if SCALE == 0
    Held<T, N> made;
    narrow_all(value, made);
#else
    Vector<u8, N> made;
#pragma unroll
    for (int i = 0; i < N; i++) made.at[i] = (u8)e4m3_pair(value[i] / scale, 0.0f);
#endif
    put<Stored, N>(out + column * p.o_column, made);
  }
}

extern "C" __global__ void __launch_bounds__(256) merge_elements(const Parameters p) { merge<1>(p); }
EMULATED(merge_elements, Parameters)

#if WIDTH % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) merge_vectors(const Parameters p) { merge<16 / SIZE>(p); }
EMULATED(merge_vectors, Parameters)
#endif
