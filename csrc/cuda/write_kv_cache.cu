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
  i64 lanes, parts, q_heads, num_positions;
  i64 q_token, q_head, q_column, p_step, c_row, c_column;
#endif
  float k_scale, v_scale;
};

#if FORMAT == 0
typedef T Stored;
#else
typedef u8 Stored;
#endif

INLINE u16 pair_of(float low, float high) { return FORMAT == 1 ? e4m3_pair(low, high) : e5m2_pair(low, high); }

// Division takes twice the time of all else. Where no element is NaN or far past the largest code, and the scale not near
// the ends of its range, multiplications give the same bits: see `Divisor`.
template <int N> INLINE void codes_of(float (&x)[N], float scale, Vector<u8, N>& made) {
  bool usual = scale >= 8.2718061e-25f && scale <= 1.3292280e36f;  // 2^-80, 2^120
#pragma unroll
  for (int i = 0; i < N; i++) usual = usual && fabsf(x[i]) <= 1024.0f * scale;
  if (usual) {
    Divisor by(scale);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      u16 pair = pair_of(by.of(x[i]), by.of(x[i + 1]));
      made.at[i] = (u8)pair;
      made.at[i + 1] = (u8)(pair >> 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      float low = x[i] / scale, high = x[i + 1] / scale;
      u16 pair = pair_of(low, high);
      // The sign of NaN, which a pair does not keep.
      made.at[i] = (u8)pair | (u8)((bits_of(low) >> 24) & 0x80);
      made.at[i + 1] = (u8)(pair >> 8) | (u8)((bits_of(high) >> 24) & 0x80);
    }
  }
}

template <int N> INLINE void store(Stored* to, const Held<T, N>& from, float scale) {
#if FORMAT == 0
  put<Stored, N>(to, from);
#else
  float x[N];
  widen_all(from, x);
  Vector<u8, N> made;
  if constexpr (N == 1) made.at[0] = FORMAT == 1 ? e4m3_by_hand(x[0] / scale) : e5m2_by_hand(x[0] / scale);
  else codes_of(x, scale, made);
  put<u8, N>(to, made);
#endif
}

// Of numbers that are not negative; a division of 64 bits takes far longer than one of 32.
INLINE i64 quotient(i64 of, u32 by) { return of >> 32 ? of / by : (u32)of / by; }

INLINE float scale_of(const float* at, float value, int head) { return SCALE == 3 ? at[head] : SCALE == 2 ? *at : value; }

#if !ROPE
// N elements at a time, EACH times.
template <int N, int EACH> INLINE void write(const Parameters& p) {
  follow_launches();
  constexpr int KEYS = K_WIDTH / N, VALUES = V_WIDTH / N, HEAD = KEYS + VALUES, TOKEN = HEADS * HEAD;
  i64 slots[EACH];
  int heads[EACH], columns[EACH];
  bool are_keys[EACH];
  Held<T, N> got[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    i64 at = ((i64)blockIdx.x * EACH + i) * blockDim.x + threadIdx.x, token = quotient(at, TOKEN);
    int rest = (int)(at - token * TOKEN), head = rest / HEAD, column = rest % HEAD;
    bool is_key = column < KEYS;
    column = (is_key ? column : column - KEYS) * N;
    heads[i] = head, columns[i] = column, are_keys[i] = is_key, slots[i] = -1;
    if (token >= p.tokens) continue;
    slots[i] = p.slots[token * p.slot_step];
    got[i] = held<T, N>(is_key ? p.k + token * p.k_token + head * p.k_head + column * p.k_column
                               : p.v + token * p.v_token + head * p.v_head + column * p.v_column);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    i64 slot = slots[i], head = heads[i], column = columns[i];
    if (slot < 0 || slot >= p.num_slots) continue;
    i64 page = quotient(slot, PAGE), place = slot - page * PAGE;
    Stored* to = are_keys[i]
                     ? (Stored*)p.k_cache + page * p.kc_page + place * p.kc_place + head * p.kc_head + column * p.kc_column
                     : (Stored*)p.v_cache + page * p.vc_page + place * p.vc_place + head * p.vc_head + column * p.vc_column;
    float scale = SCALE == 0    ? 1.0f
                  : are_keys[i] ? scale_of(p.k_scale_at, p.k_scale, (int)head)
                                : scale_of(p.v_scale_at, p.v_scale, (int)head);
    store<N>(to, got[i], scale);
  }
}

extern "C" __global__ void __launch_bounds__(256) write_elements(const Parameters p) { write<1, 1>(p); }
EMULATED(write_elements, Parameters)

#if K_WIDTH % (16 / SIZE) == 0 && V_WIDTH % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) write_vectors(const Parameters p) { write<16 / SIZE, 1>(p); }
extern "C" __global__ void __launch_bounds__(256) write_twice(const Parameters p) { write<16 / SIZE, 2>(p); }
EMULATED(write_vectors, Parameters)
EMULATED(write_twice, Parameters)
#endif
#else

constexpr int HALF = ROTARY / 2, REST = K_WIDTH - ROTARY;

template <int N> INLINE void cos_and_sin(const Parameters& p, i64 position, int pair, float (&cos)[N], float (&sin)[N]) {
  const float* row = p.cos_sin + position * p.c_row + pair * p.c_column;
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
}

// Pairs in two vectors: of columns one half apart, or neighbours one after another.
template <int N> INLINE void turn(const float (&cos)[N], const float (&sin)[N], Held<T, N>& x, Held<T, N>& y) {
  float from[2][N], to[2][N];
  widen_all(x, from[0]);
  widen_all(y, from[1]);
#pragma unroll
  for (int j = 0; j < N; j++) {
    int first = ROPE == 1 ? j : 2 * j, second = ROPE == 1 ? N + j : first + 1;
    float a = from[first / N][first % N], b = from[second / N][second % N];
    to[first / N][first % N] = __fsub_rn(__fmul_rn(a, cos[j]), __fmul_rn(b, sin[j]));
    to[second / N][second % N] = __fadd_rn(__fmul_rn(b, cos[j]), __fmul_rn(a, sin[j]));
  }
  narrow_all(to[0], x);
  narrow_all(to[1], y);
}

// A vector of keys or values that is not turned.
template <int N> struct Plain {
  static constexpr int RESTS = REST / N, VALUES = V_WIDTH / N, OF_TOKEN = HEADS * (RESTS + VALUES);
  bool is_value;
  int head, column;
  INLINE_METHOD explicit Plain(int at) {
    is_value = at >= HEADS * RESTS;
    if (is_value) at -= HEADS * RESTS;
    int each = is_value ? VALUES : RESTS > 0 ? RESTS : 1;
    head = at / each;
    column = at % each * N + (is_value ? 0 : ROTARY);
  }
  INLINE_METHOD Held<T, N> read(const Parameters& p, i64 token) const {
    return held<T, N>(is_value ? p.v + token * p.v_token + head * p.v_head + column * p.v_column
                               : p.k + token * p.k_token + head * p.k_head + column * p.k_column);
  }
  INLINE_METHOD void write(const Parameters& p, i64 page, i64 place, const Held<T, N>& got) const {
    Stored* to = is_value
                     ? (Stored*)p.v_cache + page * p.vc_page + place * p.vc_place + head * p.vc_head + column * p.vc_column
                     : (Stored*)p.k_cache + page * p.kc_page + place * p.kc_place + head * p.kc_head + column * p.kc_column;
    float scale = SCALE == 0 ? 1.0f
                  : is_value ? scale_of(p.v_scale_at, p.v_scale, head)
                             : scale_of(p.k_scale_at, p.k_scale, head);
    store<N>(to, got, scale);
  }
};

// `lanes` threads of each of `parts` blocks share a token. A thread turns the same columns of EACH heads at a time, and
// asks for what it turns and its first other vector before it uses the position.
template <int N, int EACH> INLINE void rotate_and_write(const Parameters& p) {
  follow_launches();
  constexpr u32 PAIRS = HALF / N, ACROSS = PAIRS < 256 ? PAIRS : 256, OTHERS = Plain<N>::OF_TOKEN;
  u32 lanes = (u32)p.lanes, parts = (u32)p.parts, of_block = 0, lane = threadIdx.x, block = blockIdx.x, part = 0;
  if (lanes < blockDim.x) of_block = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  if (parts > 1) block = blockIdx.x / parts, part = blockIdx.x % parts;
  i64 token = (i64)block * (lanes < blockDim.x ? blockDim.x / lanes : 1) + of_block;
  if (token >= p.tokens) return;
  i64 position = p.positions[token * p.p_step], slot = p.slots[token * p.slot_step];
  u32 at = part * lanes + lane, all = parts * lanes, q_heads = (u32)p.q_heads, heads = q_heads + HEADS, step = all / ACROSS;
  Held<T, N> other;
  if (at < OTHERS) other = Plain<N>(at).read(p, token);
  bool stored = slot >= 0 && slot < p.num_slots;
  T* q = p.q + token * p.q_token;
  const T* k = p.k + token * p.k_token;
  i64 q_column = N > 1 ? 1 : p.q_column, k_column = N > 1 ? 1 : p.k_column, kc_column = N > 1 ? 1 : p.kc_column;
#pragma unroll 1
  for (u32 column = at % ACROSS * N; column < HALF; column += ACROSS * N) {
    u32 first = ROPE == 1 ? column : 2 * column, apart = ROPE == 1 ? HALF : N;
#pragma unroll 1
    for (u32 from = at / ACROSS; from < heads; from += EACH * step) {
      Held<T, N> x[EACH], y[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        u32 head = from + i * step;
        if (head >= heads) continue;
        bool of_q = head < q_heads;
        i64 by = of_q ? q_column : k_column;
        const T* row = (of_q ? q : k) + (of_q ? head : head - q_heads) * (of_q ? p.q_head : p.k_head) + first * by;
        x[i] = held<T, N>(row);
        y[i] = held<T, N>(row + apart * by);
      }
      if (position < 0 || position >= p.num_positions) return;
      float cos[N], sin[N];
      cos_and_sin<N>(p, position, column, cos, sin);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        u32 head = from + i * step;
        if (head >= heads) continue;
        turn<N>(cos, sin, x[i], y[i]);
        if (head < q_heads) {
          T* row = q + head * p.q_head + first * q_column;
          put<T, N>(row, x[i]);
          put<T, N>(row + apart * q_column, y[i]);
        } else if (stored) {
          head -= q_heads;
          float scale = SCALE == 0 ? 1.0f : scale_of(p.k_scale_at, p.k_scale, head);
          i64 page = quotient(slot, PAGE), place = slot - page * PAGE;
          Stored* row = (Stored*)p.k_cache + page * p.kc_page + place * p.kc_place + head * p.kc_head + first * kc_column;
          store<N>(row, x[i], scale);
          store<N>(row + apart * kc_column, y[i], scale);
        }
      }
    }
  }
  if (!stored || position < 0 || position >= p.num_positions) return;
  i64 page = quotient(slot, PAGE), place = slot - page * PAGE;
  if (at < OTHERS) Plain<N>(at).write(p, page, place, other);
  for (at += all; at < OTHERS; at += all) Plain<N>(at).write(p, page, place, Plain<N>(at).read(p, token));
}

extern "C" __global__ void __launch_bounds__(256) write_elements(const Parameters p) { rotate_and_write<1, 4>(p); }
EMULATED(write_elements, Parameters)

#if ROTARY % (32 / SIZE) == 0 && K_WIDTH % (16 / SIZE) == 0 && V_WIDTH % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) write_vectors(const Parameters p) { rotate_and_write<16 / SIZE, 4>(p); }
extern "C" __global__ void __launch_bounds__(256) write_few(const Parameters p) { rotate_and_write<16 / SIZE, 1>(p); }
EMULATED(write_vectors, Parameters)
EMULATED(write_few, Parameters)
#endif
#endif
