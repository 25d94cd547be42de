// Number formats and vectors, without a header of CUDA: NVRTC compiles this as it is, g++ with the emulation of the tests.
//
// float8 comes as bytes. Conversions from float32 round to nearest, ties to even, and saturate; instructions do them
// where the device has them (sm_89 and later), else bits are worked by hand, with equal results.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef KERNELHUB_EMULATED
#define INLINE static __device__ __forceinline__
#define INLINE_METHOD __device__ __forceinline__
#define EMULATED(kernel, Parameters)
INLINE u32 bits_of(float x) { return __float_as_uint(x); }
INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
#endif

#ifndef OVERLAPS
#define OVERLAPS 0  // whether blocks may be placed before the launch before has ended
#endif

constexpr int WARP = 32;
constexpr float E4M3_MAX = 448.0f, E2M1_MAX = 6.0f;
constexpr float LEAST_SCALE = 1.17549435e-38f, LEAST_NVFP4_SCALE = 0.001953125f;  // 2^-126, 2^-9

// First in every kernel, before any access to memory: the next launch may place its blocks, and this one waits until all
// of the launches before it are done and what they wrote is seen.
INLINE void begin_next_launch() {
#if !defined(KERNELHUB_EMULATED) && OVERLAPS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INLINE void wait_for_launches() {
#if !defined(KERNELHUB_EMULATED) && OVERLAPS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
INLINE void follow_launches() {
  begin_next_launch();
  wait_for_launches();
}

// N elements that one instruction moves: up to 16 bytes, aligned to their size.
template <typename T, int N> struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

template <typename T, typename U> constexpr bool SAME = false;
template <typename T> constexpr bool SAME<T, T> = true;

// N elements as words, which are taken apart where they are used: an instruction that takes one apart waits for its load,
// and with it all loads behind it in the program.
template <typename T, int N, bool WORDS = sizeof(T) * N % 4 == 0> struct Held {
  u32 words[sizeof(T) * N / 4];

  INLINE_METHOD Vector<T, N> opened() const {
    Vector<T, N> made;
    memcpy(&made, words, sizeof words);
    return made;
  }
};
template <typename T, int N> struct Held<T, N, false> {
  Vector<T, N> all;

  INLINE_METHOD Vector<T, N> opened() const { return all; }
};

template <typename T, int N> INLINE Held<T, N> held(const T* from) {
  Held<T, N> got;
  if constexpr (sizeof(T) * N % 4) {
    got.all = *(const Vector<T, N>*)from;
  } else {
    constexpr int COUNT = sizeof(T) * N / 4;
    Vector<u32, COUNT> words = *(const Vector<u32, COUNT>*)from;
#pragma unroll
    for (int i = 0; i < COUNT; i++) got.words[i] = words.at[i];
  }
  return got;
}

// One store of a vector; the compiler divides that of a struct whose elements it has in registers.
template <typename T, int N> INLINE void put(T* to, const Held<T, N>& made) {
#ifndef KERNELHUB_EMULATED
  if constexpr (sizeof(T) * N == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(made.words[0]), "r"(made.words[1]), "r"(made.words[2]), "r"(made.words[3])
                 : "memory");
    return;
  } else if constexpr (sizeof(T) * N == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(made.words[0]), "r"(made.words[1]) : "memory");
    return;
  }
#endif
  *(Vector<T, N>*)to = made.opened();
}
template <typename T, int N> INLINE void put(T* to, const Vector<T, N>& made) {
  if constexpr (sizeof(T) * N % 4) {
    *(Vector<T, N>*)to = made;
  } else {
    Held<T, N> words;
    memcpy(words.words, &made, sizeof words.words);
    put<T, N>(to, words);
  }
}

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

INLINE float widened(float x) { return x; }
INLINE float widened(bf16 x) { return float_of((u32)x.bits << 16); }
INLINE float widened(f16 x) {
#ifdef KERNELHUB_EMULATED
  return half_to_float(x.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(float x, bf16& to) {
#ifndef KERNELHUB_EMULATED
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  u32 bits = bits_of(x);
  u32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (u16)rounded;  // NaN
#endif
}
INLINE void narrow(float x, f16& to) {
#ifdef KERNELHUB_EMULATED
  to.bits = float_to_half(x);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

// Two at once, the first in the low half.
INLINE u32 narrow_pair(float low, float high, bf16) {
  u32 pair;
#ifdef KERNELHUB_EMULATED
  bf16 halves[2];
  narrow(low, halves[0]);
  narrow(high, halves[1]);
  pair = halves[0].bits | (u32)halves[1].bits << 16;
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
INLINE u32 narrow_pair(float low, float high, f16) {
  u32 pair;
#ifdef KERNELHUB_EMULATED
  f16 halves[2];
  narrow(low, halves[0]);
  narrow(high, halves[1]);
  pair = halves[0].bits | (u32)halves[1].bits << 16;
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

template <typename T, int N> INLINE void widen_all(const Held<T, N>& from, float (&x)[N]) {
#ifndef KERNELHUB_EMULATED
  if constexpr (SAME<T, bf16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      x[i] = float_of(from.words[i / 2] << 16);
      x[i + 1] = float_of(from.words[i / 2] & 0xFFFF0000);
    }
    return;
  } else if constexpr (SAME<T, f16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2)
      asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
          : "=f"(x[i]), "=f"(x[i + 1])
          : "r"(from.words[i / 2]));
    return;
  }
#endif
  Vector<T, N> opened = from.opened();
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = widened(opened.at[i]);
}

template <typename T, int N> INLINE void narrow_all(const float (&x)[N], Held<T, N>& to) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) to.words[i / 2] = narrow_pair(x[i], x[i + 1], T());
  } else {
    Vector<T, N> made;
#pragma unroll
    for (int i = 0; i < N; i++) narrow(x[i], made.at[i]);
    memcpy(&to, &made, sizeof made);
  }
}

// Largest finite numbers, which infinity counts as.
template <typename T> struct Largest;
template <> struct Largest<float> {
  static constexpr float value = 3.402823466e38f;
};
template <> struct Largest<bf16> {
  static constexpr float value = 3.3895313892515355e38f;
};
template <> struct Largest<f16> {
  static constexpr float value = 65504.0f;
};

// Bits of float8_e4m3fn; of NaN 0x7f, with the sign.
INLINE u8 e4m3_by_hand(float x) {
  u32 bits = bits_of(x), size = bits & 0x7FFFFFFF, code;
  if (size > 0x7F800000) code = 0x7F;
  else if (size >= 0x43E80000) code = 0x7E;  // from 464, half way to what would follow 448
  else if (size < 0x3C800000) code = bits_of(float_of(size) + 16384.0f) - 0x46800000;  // below 2^-6 the step is 2^-9
  else code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960;  // the exponent's bias is smaller by 120
  return (u8)(code | ((bits >> 24) & 0x80));
}

// Bits of float8_e5m2; of NaN 0x7f, with the sign.
INLINE u8 e5m2_by_hand(float x) {
  u32 bits = bits_of(x), size = bits & 0x7FFFFFFF, code;
  if (size > 0x7F800000) code = 0x7F;
  else if (size >= 0x47600000) code = 0x7B;                                          // from 57344, the largest number
  else if (size < 0x38800000) code = bits_of(float_of(size) + 128.0f) - 0x43000000;  // below 2^-14 the step is 2^-16
  else code = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - 448;                   // the exponent's bias is smaller by 112
  return (u8)(code | ((bits >> 24) & 0x80));
}

#if !defined(KERNELHUB_EMULATED) && __CUDA_ARCH__ >= 890
#define HAS_FLOAT8 1
#else
#define HAS_FLOAT8 0
#endif

// Two codes, the first in the low byte. The instruction forgets the sign of NaN.
INLINE u16 e4m3_pair(float low, float high) {
#if HAS_FLOAT8
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return (u16)((e4m3_by_hand(low) & (low == low ? 0xFF : 0x7F)) |
               ((e4m3_by_hand(high) & (high == high ? 0xFF : 0x7F)) << 8));
#endif
}

INLINE u16 e5m2_pair(float low, float high) {
#if HAS_FLOAT8
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return (u16)((e5m2_by_hand(low) & (low == low ? 0xFF : 0x7F)) |
               ((e5m2_by_hand(high) & (high == high ? 0xFF : 0x7F)) << 8));
#endif
}

// The value of float8_e4m3fn bits other than NaN.
INLINE float e4m3_value(u8 raw) {
  u32 size = raw & 0x7F, sign = (u32)(raw & 0x80) << 24;
  float value = size >= 8 ? float_of((size + 960) << 20) : (float)size * 0.001953125f;  // steps of 2^-9 below 2^-6
  return float_of(bits_of(value) | sign);
}

// Four bits of float4_e2m1, saturating at 6; not for NaN.
INLINE u32 e2m1_of(float x) {
  float size = fminf(fabsf(x), E2M1_MAX);
  // Steps are half the power of two below a number, 0.5 at least. Beside 2^22 times that power they are the last bit.
  u32 power = bits_of(size) & 0x7F800000;
  power = power < 0x3F800000 ? 0x3F800000 : power;
  u32 beside = power + 0x0B000000;
  u32 steps = bits_of(size + float_of(beside)) - beside;
  return (steps + ((power - 0x3F800000) >> 22)) | ((bits_of(x) >> 28) & 8);
}

// The least power of two that is not below x >= 0, at least 2^-126.
INLINE float power_of_two_above(float x) {
  u32 bits = bits_of(x);
  u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
  exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
  return float_of(exponent << 23);
}

INLINE float larger(float x, float y) { return fmaxf(x, y); }  // of NaN and a number the number

// x / scale rounded to nearest, for many x of one scale. y = RN(1 / scale) gives q = RN(x y), at most 1.5 units off. A
// first q + (x - q scale) y is faithful, a second one rounds right (Markstein 1990), if remainders are exact and nothing
// overflows: |x| up to 1024 scale, scale from 2^-90 to 2^120. Smaller scales are multiplied by `lift`, 2^64; if
// `lifted`, so must be their x.
struct Divisor {
  float scale, reciprocal, lift;
  bool lifted;
  INLINE_METHOD explicit Divisor(float of) {
    lifted = of < 8.0779357e-28f;  // 2^-90
    lift = lifted ? 18446744073709551616.0f : 1.0f;
    scale = of * lift;
    reciprocal = 1.0f / scale;
  }
  INLINE_METHOD float of(float x) const {
    float q = x * reciprocal;
    q = fmaf(fmaf(q, scale, -x), -reciprocal, q);
    return fmaf(fmaf(q, scale, -x), -reciprocal, q);
  }
};
