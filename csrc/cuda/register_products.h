// Products of a warpgroup (wgmma) whose first operand was made in registers, and numbers of bfloat16 by pairs.
#pragma once
#include "warpgroup.h"

#define SUMS_64(d) FLOATS_32(d, 0), FLOATS_32(d, 32)
#define SUMS_96(d) SUMS_64(d), FLOATS_32(d, 64)
#define TEXT_OF_64                                                                   \
  TEXT_32                                                                            \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_OF_96                                                                   \
  TEXT_OF_64                                                                         \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define SUMS_16(d) FLOATS_8(d, 0), FLOATS_8(d, 8)
#define TEXT_OF_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_OF_16 TEXT_OF_8 ", %8, %9, %10, %11, %12, %13, %14, %15"

// d += a b of 64 x N numbers: a in registers, b in shared memory along what is summed over.
INLINE void multiply_made(float (&d)[8], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%12, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{" TEXT_OF_8
      "}, "
      "{%8, %9, %10, %11}, b, 1, 1, 1, 0;\n\t}"
      : FLOATS_8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
INLINE void multiply_made(float (&d)[16], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%20, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{" TEXT_OF_16
      "}, "
      "{%16, %17, %18, %19}, b, 1, 1, 1, 0;\n\t}"
      : SUMS_16(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
INLINE void multiply_made(float (&d)[32], const u32* a, u32 b) { multiply_64(d, a, b); }
INLINE void multiply_made(float (&d)[64], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%68, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" TEXT_OF_64
      "}, "
      "{%64, %65, %66, %67}, b, 1, 1, 1, 0;\n\t}"
      : SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
INLINE void multiply_made(float (&d)[96], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%100, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{" TEXT_OF_96
      "}, "
      "{%96, %97, %98, %99}, b, 1, 1, 1, 0;\n\t}"
      : SUMS_96(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
INLINE void multiply_made(float (&d)[128], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%132, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" TEXT_128
      "}, "
      "{%128, %129, %130, %131}, b, 1, 1, 1, 0;\n\t}"
      : FLOATS_128(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

// Until at most LEFT groups of products are under way. Sums are not touched before `settle`.
template <int LEFT> INLINE void made_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory"); }
template <int COUNT> INLINE void settle(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i]));
}

// Two products of bfloat16, subnormal numbers too.
INLINE u32 times_pair(u32 x, u32 y) {
  u32 made;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(x), "r"(y));
  return made;
}

// Two numbers of float8_e4m3fn, NaN too; the first in the low byte.
INLINE void widen_e4m3(u32 pair, float& low, float& high) {
  asm("{\n\t.reg .b16 both, x, y;\n\t.reg .b32 wide, rest;\n\tmov.b32 {both, x}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 wide, both;\n\tmov.b32 {x, y}, wide;\n\tcvt.f32.f16 %0, x;\n\tcvt.f32.f16 %1, y;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

// --- shared memory

INLINE void load_words(u32 (&x)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}
INLINE void load_words(u32 (&x)[2], u32 from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from) : "memory");
}
INLINE void store_words(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
INLINE void store_words(u32 to, const u32 (&x)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" : : "r"(to), "r"(x[0]), "r"(x[1]) : "memory");
}
// Four matrices of 8 x 8 numbers, each column of which becomes 16 bytes at the address that a lane gives.
INLINE void store_transposed(u32 to, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// What another block wrote in this launch, not from this multiprocessor's own cache.
INLINE float4 load_written(const float4* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
