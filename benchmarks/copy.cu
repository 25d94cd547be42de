// As many bytes as a call of another kernel reads and writes, moved by the simplest kernel: what the device can do.
//
// Defined by the host: EACH, vectors of 16 bytes that a thread reads before it writes one; STREAMED (1: loads are not kept
// in L1, what is stored is the first to leave the caches).
#include "formats.h"

struct Parameters {
    const u32 *from;
    u32 *to;
    i64 reads, writes;  // vectors
};

INLINE Held<u32, 4> read(const u32 *from) {
#if STREAMED && !defined(KERNELHUB_EMULATED)
    Held<u32, 4> got;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.words[0]), "=r"(got.words[1]), "=r"(got.words[2]), "=r"(got.words[3])
                 : "l"(from));
    return got;
#else
    return held<u32, 4>(from);
#endif
}

INLINE void write(u32 *to, const Held<u32, 4> &made) {
#if STREAMED && !defined(KERNELHUB_EMULATED)
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(made.words[0]), "r"(made.words[1]), "r"(made.words[2]), "r"(made.words[3])
                 : "memory");
#else
    put<u32, 4>(to, made);
#endif
}

extern "C" __global__ void __launch_bounds__(512) copy(const Parameters p) {
    follow_launches();
    Held<u32, 4> got[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        i64 at = ((i64)blockIdx.x * EACH + i) * blockDim.x + threadIdx.x;
        if (at < p.reads) got[i] = read(p.from + 4 * at);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        i64 at = ((i64)blockIdx.x * EACH + i) * blockDim.x + threadIdx.x;
        // Zeros are expected, so that what is only read is used, and not written.
        u32 any = got[i].words[0] | got[i].words[1] | got[i].words[2] | got[i].words[3];
        if (at < p.writes || any != 0) write(p.to + 4 * (at % p.writes), got[i]);
    }
}
EMULATED(copy, Parameters)
