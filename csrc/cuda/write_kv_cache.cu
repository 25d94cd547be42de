// New tokens into the pages of a KV cache. A thread moves vectors of one head of one token, keys and values alike.
//
// Defined by the host: ELEMENT (bf16, f16, float; of values whose bits are copied u16 or u32), FORMAT (0 bits, 1 e4m3,
// 2 e5m2), SCALE (0 none, 1 a number, 2 at an address, 3 one for each head), PAGE, HEADS, K_WIDTH, V_WIDTH.
#include "formats.h"

typedef ELEMENT T;

struct Parameters {
  const T *k, *v;
  void *k_cache, *v_cache;
  const i64* slots;
  const float *k_scale_at, *v_scale_at;
  i64 tokens, num_slots;
  i64 k_token, k_head, k_column, v_token, v_head, v_column;
  i64 kc_page, kc_place, kc_head, kc_column, vc_page, vc_place, vc_head, vc_column;
  i64 slot_step;
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
