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

template <int N> INLINE void concat(const Parameters& p) {
  constexpr int OWN = COPIES ? NOPE / N : 0, HEAD = OWN + ROPE / N, TOKEN = HEADS * HEAD;
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 token = at / TOKEN;
  if (token >= p.tokens) return;
  int rest = (int)(at - token * TOKEN), head = rest / HEAD, column = rest % HEAD;
  bool own = column < OWN;
  i64 from_column = (own ? column : column - OWN) * N, to_column = own ? from_column : NOPE + from_column;
  const T* from = own ? p.k_nope + token * p.n_token + head * p.n_head + from_column * p.n_column
                      : p.k_rope + token * p.r_token + from_column * p.r_column;
  T* to = p.out + token * p.o_token + head * p.o_head + to_column * p.o_column;
  *(Vector<T, N>*)to = *(const Vector<T, N>*)from;
}

extern "C" __global__ void __launch_bounds__(256) concat_elements(const Parameters p) { concat<1>(p); }
EMULATED(concat_elements, Parameters)

#if NOPE % (16 / SIZE) == 0 && ROPE % (16 / SIZE) == 0
extern "C" __global__ void __launch_bounds__(256) concat_vectors(const Parameters p) { concat<16 / SIZE>(p); }
EMULATED(concat_vectors, Parameters)
#endif
