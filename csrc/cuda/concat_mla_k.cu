// Keys of latent attention: each head's own part, then the rotary part that all heads share. Bits are moved.
//
// Defined by the host: ELEMENT (u8, u16, u32), SIZE of one, HEADS, NOPE, ROPE, COPIES (0: out already contains the own
// parts).
#include "formats.h"

typedef ELEMENT T;

struct Parameters {
  const T *k_nope, *k_rope;
  T* out;
  i64 tokens;
  i64 n_token, n_head, n_column, r_token, r_column, o_token, o_head, o_column;
};

// Of numbers that are not negative; a division of 64 bits takes far longer than one of 32.
INLINE i64 quotient(i64 of, u32 by) { return of >> 32 ? of / by : (u32)of / by; }

// N elements at a time, EACH times.
template <int N, int EACH> INLINE void concat(const Parameters& p) {
  follow_launches();
  constexpr int OWN = COPIES ? NOPE / N : 0, HEAD = OWN + ROPE / N, TOKEN = HEADS * HEAD;
  T* to[EACH];
  Held<T, N> got[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    i64 at = ((i64)blockIdx.x * EACH + i) * blockDim.x + threadIdx.x, token = quotient(at, TOKEN);
    u32 rest = (u32)(at - token * TOKEN), head = rest / HEAD, column = rest % HEAD;
    bool own = column < OWN;
    i64 from_column = (own ? column : column - OWN) * N, to_column = own ? from_column : NOPE + from_column;
    const T* from = own ? p.k_nope + token * p.n_token + head * p.n_head + from_column * p.n_column
                        : p.k_rope + token * p.r_token + from_column * p.r_column;
    to[i] = token < p.tokens ? p.out + token * p.o_token + head * p.o_head + to_column * p.o_column : nullptr;
    if (to[i] != nullptr) got[i] = held<T, N>(from);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (to[i] != nullptr) put<T, N>(to[i], got[i]);
}

extern "C" __global__ void __launch_bounds__(256) concat_elements(const Parameters p) { concat<1, 1>(p); }
EMULATED(concat_elements, Parameters)

#if NOPE % (16 / SIZE) == 0 && ROPE % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) concat_vectors(const Parameters p) { concat<16 / SIZE, 1>(p); }
extern "C" __global__ void __launch_bounds__(256) concat_twice(const Parameters p) { concat<16 / SIZE, 2>(p); }
EMULATED(concat_vectors, Parameters)
EMULATED(concat_twice, Parameters)
#endif
