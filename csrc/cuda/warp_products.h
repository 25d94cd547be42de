// Matrix products of a warp (mma.sync), what brings their operands from shared memory, and copies that run beside them.
//
// Of a product of 16 x 8 numbers over 16, lane 4 g + t has of a the rows g (words 0 and 2) and g + 8 (1 and 3), columns
// 2 t + {0, 1} (0 and 1) and 8 further (2 and 3); of b the column g, rows 2 t + {0, 1} and 8 further; of the sums the row
// g (0 and 1) and g + 8, columns 2 t + {0, 1}. What is summed over may come in any order that a and b share.
#pragma once
#include "formats.h"

struct alignas(16) Words {
  u32 at[4];
};

#ifdef KERNELHUB_EMULATED
#include "emulated_products.h"
#else
#define DYNAMIC_SHARED(name, bytes) extern __shared__ __align__(128) char name[]

INLINE u32 address_in_shared(const void* of) { return (u32)__cvta_generic_to_shared(of); }

// 16 bytes of global memory, which arrive once their group is waited for; the second form writes zeros unless `there`, and
// reads nothing then.
INLINE void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
INLINE void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
INLINE void copies_end() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Until at most LEFT groups of this thread are under way.
template <int LEFT> INLINE void copies_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }

INLINE Words read_words(u32 at) {
  Words x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3])
               : "r"(at)
               : "memory");
  return x;
}

// Four matrices of 8 x 8 pairs of bytes, transposed; lane 8 i + j names row j of matrix i, of which word i is.
INLINE Words read_transposed(u32 at) {
  Words x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3])
               : "r"(at)
               : "memory");
  return x;
}
// One such matrix from registers to registers.
INLINE u32 transposed(u32 x) {
  u32 made;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(made) : "r"(x));
  return made;
}

INLINE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
INLINE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four codes of float8 as float16, which holds them exactly: the low two and the high two.
INLINE void widen_e4m3(u32 codes, u32& low, u32& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
INLINE u32 permuted(u32 x, u32 selector) { return __byte_perm(x, 0, selector); }
INLINE float exp2_of(float x) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}
INLINE float log2_of(float x) {
  float made;
  asm("lg2.approx.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}
INLINE bool any_of_warp(bool x) { return __any_sync(~0u, x); }
#endif
INLINE void widen_e5m2(u32 codes, u32& low, u32& high) {
  low = permuted(codes, 0x1404);
  high = permuted(codes, 0x3424);
}
