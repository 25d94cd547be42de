// New tokens into the pages of a KV cache. A thread moves vectors of one head of one token, keys and values alike.
//
// With ROPE keys are rotated on the way, and queries in place: a thread has both columns of each of its pairs.
//   a', b' = a cos - b sin, b cos + a sin
// in float32, each product and sum rounded, so that all kernels give the same bits; then rounded to ELEMENT.
//
// Defined by the host: ELEMENT (bf16, f16, float; of values whose bits are copied u16 or u32), FORMAT (0 bits, 1 e4m3,
// 2 e5m2), SCALE (0 none, 1 a number, 2 at an address, 3 one for each head), PAGE, HEADS, K_WIDTH, V_WIDTH, ROPE (0 none, 1
// of columns i and i + ROTARY / 2, 2 of neighbours), ROTARY, the columns that are rotated.
#include "formats.h"

typedef ELEMENT T;

struct Parameters {
  const T *k, *v;
  void *k_cache, *v_cache;
  const i64* slots;
  const float *k_scale_at, *v_scale_at;
#if ROPE
  T* q;
  const i64* positions;
  const float* cos_sin;
#endif
  i64 tokens, num_slots;
  i64 k_token, k_head, k_column, v_token, v_head, v_column;
  i64 kc_page, kc_place, kc_head, kc_column, vc_page, vc_place, vc_head, vc_column;
  i64 slot_step;
#if ROPE
  i64 q_heads, num_positions;
  i64 q_token, q_head, q_column, p_step, c_row, c_column;
#endif
  float k_scale, v_scale;
};

#if FORMAT == 0
typedef T Stored;
#else
typedef u8 Stored;
#endif

template <int N> INLINE void encode(const Vector<T, N>& from, float scale, Vector<Stored, N>& to) {
#pragma unroll
  for (int i = 0; i < N; i++) {
#if FORMAT == 0
    to.at[i] = from.at[i];
#else
    float x = widened(from.at[i]) / scale;
    if constexpr (N == 1) {
      to.at[i] = FORMAT == 1 ? e4m3_by_hand(x) : e5m2_by_hand(x);
    } else if (i % 2 == 0) {
      float next = widened(from.at[i + 1]) / scale;
      u16 pair = FORMAT == 1 ? e4m3_pair(x, next) : e5m2_pair(x, next);
      // The sign of NaN, which a pair does not keep.
      to.at[i] = (u8)pair | (u8)((bits_of(x) >> 24) & 0x80);
      to.at[i + 1] = (u8)(pair >> 8) | (u8)((bits_of(next) >> 24) & 0x80);
    }
#endif
  }
}

INLINE float scale_of(const float* at, float value, int head) { return SCALE == 3 ? at[head] : SCALE == 2 ? *at : value; }

#if !ROPE
// N elements at a time: a program of the grid takes as many vectors as it has threads.
template <int N> INLINE void write(const Parameters& p) {
  constexpr int KEYS = K_WIDTH / N, VALUES = V_WIDTH / N, HEAD = KEYS + VALUES, TOKEN = HEADS * HEAD;
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 token = at / TOKEN;
  if (token >= p.tokens) return;
  int rest = (int)(at - token * TOKEN), head = rest / HEAD, column = rest % HEAD;
  bool is_key = column < KEYS;
  if (!is_key) column -= KEYS;
  column *= N;
  i64 slot = p.slots[token * p.slot_step];
  const T* from = is_key ? p.k + token * p.k_token + head * p.k_head + column * p.k_column
                         : p.v + token * p.v_token + head * p.v_head + column * p.v_column;
  Vector<T, N> got = *(const Vector<T, N>*)from;
  if (slot < 0 || slot >= p.num_slots) return;
  i64 page = slot / PAGE, place = slot % PAGE;
  Stored* to = is_key ? (Stored*)p.k_cache + page * p.kc_page + place * p.kc_place + head * p.kc_head + column * p.kc_column
                      : (Stored*)p.v_cache + page * p.vc_page + place * p.vc_place + head * p.vc_head + column * p.vc_column;
  Vector<Stored, N> made;
  encode<N>(got,
            SCALE == 0 ? 1.0f
            : is_key   ? scale_of(p.k_scale_at, p.k_scale, head)
                       : scale_of(p.v_scale_at, p.v_scale, head),
            made);
  *(Vector<Stored, N>*)to = made;
}

extern "C" __global__ void __launch_bounds__(256) write_elements(const Parameters p) { write<1>(p); }
EMULATED(write_elements, Parameters)

#if K_WIDTH % (16 / SIZE) == 0 && V_WIDTH % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) write_vectors(const Parameters p) { write<16 / SIZE>(p); }
EMULATED(write_vectors, Parameters)
#endif
#else

constexpr int HALF = ROTARY / 2, REST = K_WIDTH - ROTARY;

// A thread's pairs in two vectors: of columns one half apart, or neighbours one after another.
template <int N> INLINE void turn(const Parameters& p, i64 position, int pair, Vector<T, N>& x, Vector<T, N>& y) {
  const float* row = p.cos_sin + position * p.c_row + pair * p.c_column;
  float cos[N], sin[N];
  if constexpr (N == 1) {
    cos[0] = row[0];
    sin[0] = row[HALF * p.c_column];
  } else {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      Vector<float, 4> some = *(const Vector<float, 4>*)(row + j), others = *(const Vector<float, 4>*)(row + HALF + j);
#pragma unroll
      for (int i = 0; i < 4; i++) cos[j + i] = some.at[i], sin[j + i] = others.at[i];
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    T& first = ROPE == 1 ? x.at[j] : 2 * j < N ? x.at[2 * j % N] : y.at[2 * j % N];
    T& second = ROPE == 1 ? y.at[j] : 2 * j + 1 < N ? x.at[(2 * j + 1) % N] : y.at[(2 * j + 1) % N];
    float a = widened(first), b = widened(second);
    narrow(__fsub_rn(__fmul_rn(a, cos[j]), __fmul_rn(b, sin[j])), first);
    narrow(__fadd_rn(__fmul_rn(b, cos[j]), __fmul_rn(a, sin[j])), second);
  }
}

template <int N> INLINE void rotate_and_write(const Parameters& p) {
  constexpr int PAIRS = HALF / N, RESTS = REST / N, VALUES = V_WIDTH / N;
  u32 turned = ((u32)p.q_heads + HEADS) * PAIRS, of_token = turned + HEADS * (RESTS + VALUES);
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 token = at >> 32 ? at / of_token : (u32)at / of_token;  // a division of 64 bits takes far longer
  if (token >= p.tokens) return;
  i64 position = p.positions[token * p.p_step], slot = p.slots[token * p.slot_step];
  if (position < 0 || position >= p.num_positions) return;
  int rest = (int)(at - token * of_token), head, column;
  bool is_pair = rest < (int)turned, is_value = false;
  if (is_pair) {
    head = rest / PAIRS;
    column = rest % PAIRS * N;
  } else {
    rest -= turned;
    is_value = rest >= HEADS * RESTS;
    if (is_value) rest -= HEADS * RESTS;
    int each = is_value ? VALUES : RESTS > 0 ? RESTS : 1;
    head = rest / each;
    column = rest % each * N + (is_value ? 0 : ROTARY);
  }
  int first = ROPE == 1 ? column : 2 * column, second = ROPE == 1 ? column + HALF : first + N;
  if (is_pair && head < p.q_heads) {
    T* q = p.q + token * p.q_token + head * p.q_head;
    Vector<T, N>*x_at = (Vector<T, N>*)(q + first * p.q_column), *y_at = (Vector<T, N>*)(q + second * p.q_column);
    Vector<T, N> x = *x_at, y = *y_at;
    turn<N>(p, position, column, x, y);
    *x_at = x;
    *y_at = y;
    return;
  }
  if (slot < 0 || slot >= p.num_slots) return;
  i64 page = slot / PAGE, place = slot % PAGE;
  if (is_pair) head -= (int)p.q_heads;
  float scale = SCALE == 0 ? 1.0f
                : is_value ? scale_of(p.v_scale_at, p.v_scale, head)
                           : scale_of(p.k_scale_at, p.k_scale, head);
  Stored* to = is_value ? (Stored*)p.v_cache + page * p.vc_page + place * p.vc_place + head * p.vc_head
                        : (Stored*)p.k_cache + page * p.kc_page + place * p.kc_place + head * p.kc_head;
  const T* from = is_value ? p.v + token * p.v_token + head * p.v_head : p.k + token * p.k_token + head * p.k_head;
  i64 from_step = is_value ? p.v_column : p.k_column, to_step = is_value ? p.vc_column : p.kc_column;
  Vector<Stored, N> made;
  if (is_pair) {
    Vector<T, N> x = *(const Vector<T, N>*)(from + first * from_step), y = *(const Vector<T, N>*)(from + second * from_step);
    turn<N>(p, position, column, x, y);
    encode<N>(x, scale, made);
    *(Vector<Stored, N>*)(to + first * to_step) = made;
    encode<N>(y, scale, made);
    *(Vector<Stored, N>*)(to + second * to_step) = made;
  } else {
    encode<N>(*(const Vector<T, N>*)(from + column * from_step), scale, made);
    *(Vector<Stored, N>*)(to + column * to_step) = made;
  }
}

extern "C" __global__ void __launch_bounds__(256) write_elements(const Parameters p) { rotate_and_write<1>(p); }
EMULATED(write_elements, Parameters)

#if ROTARY % (32 / SIZE) == 0 && K_WIDTH % (16 / SIZE) == 0 && V_WIDTH % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) write_vectors(const Parameters p) { rotate_and_write<16 / SIZE>(p); }
EMULATED(write_vectors, Parameters)
#endif
#endif
