// Vectors of float32 as wide as the machine's, what softmax computes with them, and how keys and values become them.
#pragma once

#include "numbers.h"
#include "pairs.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int WIDE = 16;
constexpr int SUMS = 16;  // sums over lanes that are made together; registers hold them
constexpr int BUSY = 16;  // products that are added at the same time
#elif defined(__AVX2__) && defined(__F16C__)
constexpr int WIDE = 8;
constexpr int SUMS = 8;
constexpr int BUSY = 8;
#else
constexpr int WIDE = 4;
constexpr int SUMS = 8;
constexpr int BUSY = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDE)));

inline Vector load(const float *from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline void put(float *into, Vector value) { memcpy(into, &value, sizeof value); }

// A vector that several products read. g++ 12 would read it from memory for each, and a Zen 4 reads one of 512 bits in the
// time of a product.
inline Vector load_once(const float *from) {
    Vector value = load(from);
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#endif
    return value;
}

inline Vector spread(float value) { return value - Vector{}; }

inline Vector as_vector(Bits bits) {
    Vector value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline Bits as_bits(Vector value) {
    Bits bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A NaN of either is lost; the weight of its score becomes NaN later.
inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }

// e^x for x <= 0, to 2^-22 of itself; below e^-87 it is 0.
inline Vector exponential(Vector x) {
    const Vector power = x * 1.44269504088896341f;
    const Vector kept = power < -126.0f ? spread(-126.0f) : power;
    const Vector moved = kept + 12582912.0f;  // 1.5 x 2^23: the last bits are the nearest integer
    const Vector rest = kept - (moved - 12582912.0f);
    Vector result = rest * 1.535336188319500e-4f + 1.339887440266574e-3f;  // 2^rest, within 2^-24
    result = result * rest + 9.618437357674640e-3f;
    result = result * rest + 5.550332471162809e-2f;
    result = result * rest + 2.402264791363012e-1f;
    result = result * rest + 6.931472028550421e-1f;
    result = result * rest + 1.0f;
    result *= as_vector((as_bits(moved) + 127u) << 23);
    return power < -126.0f ? Vector{} : result;
}

inline float exponential(float x) { return x == 0.0f ? 1.0f : std::exp(x); }

inline Vector hyperbolic_tangent(Vector x) {
    const Vector size = as_vector(as_bits(x) & 0x7fffffffu);
    const Vector part = exponential(-2.0f * size);
    const Vector large = (1.0f - part) / (1.0f + part);
    const Vector square = x * x;
    Vector small = square * 2.1869488536155203e-2f + -5.396825396825397e-2f;  // its Taylor series, for |x| < 0.35
    small = small * square + 1.3333333333333333e-1f;
    small = small * square + -3.3333333333333333e-1f;
    small = small * square * size + size;
    const Vector result = size < 0.35f ? small : large;
    return as_vector(as_bits(result) | (as_bits(x) & 0x80000000u));
}

// into[i] = the sum of the lanes of sums[i]
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline __m512 halves_of_pair(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline __m256 sums_of_8(const __m256 *s) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
#endif

inline void add_lanes(const Vector *sums, float *into) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    // Two vectors become one at each step, with half as many lanes of each sum. 8 x 2048 keys take two threads of a Xeon
    // 0.91 to 0.93 of the time with halves of vectors and horizontal additions.
    __m512 four[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *s = reinterpret_cast<const __m512 *>(sums) + 4 * i;
        const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
        const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    static_assert(SUMS == 16, "a vector has as many sums");
    _mm512_storeu_ps(into, halves_of_pair(halves_of_pair(four[0], four[1]), halves_of_pair(four[2], four[3])));
#elif defined(__AVX2__) && defined(__F16C__)
    __m256 all[8];
    for (int i = 0; i < 8; i++) all[i] = (__m256)sums[i];
    _mm256_storeu_ps(into, sums_of_8(all));
#else
    for (int i = 0; i < SUMS; i++) {
        float sum = 0.0f;
        for (int lane = 0; lane < WIDE; lane++) sum += sums[i][lane];
        into[i] = sum;
    }
#endif
}

// How 2 * WIDE elements of a row become two vectors, and where the element d of a row is in rows of such vectors.
struct OfFloat32 {
    static constexpr int64_t BYTES = 4;
    static constexpr bool SLOW = false;  // to widen
    static int64_t place(int64_t d) { return d; }
    static void widen(const char *from, Vector &low, Vector &high) {
        memcpy(&low, from, sizeof low);
        memcpy(&high, from + sizeof low, sizeof high);
    }
};

struct OfBfloat16 {
    static constexpr int64_t BYTES = 2;
    static constexpr bool SLOW = false;  // to widen
    static int64_t place(int64_t d) { return d / (2 * WIDE) * (2 * WIDE) + d % (2 * WIDE) / 2 + d % 2 * WIDE; }
    static void widen(const char *from, Vector &low, Vector &high) {
        Bits both;  // little-endian, as all machines that PyTorch runs on
        memcpy(&both, from, sizeof both);
        low = as_vector(both << 16);
        high = as_vector(both & 0xffff0000u);
    }
};

// Formats that become float16 by shifts; a float16 256 times smaller than e4m3 has its bits.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline void widen_half(__m512i half, Vector &low, Vector &high) {
    low = (Vector)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
    high = (Vector)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}
inline __m512i load_halves(const char *from) { return _mm512_loadu_si512(from); }
inline __m512i load_bytes(const char *from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline __m512i halves_of_e5m2(__m512i code) { return _mm512_slli_epi16(code, 8); }
inline __m512i halves_of_e4m3(__m512i code) {
    const __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    const __m512i half = _mm512_slli_epi16(size, 7);
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
    const __m512i number = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
    return _mm512_or_si512(number, _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8));
}
#define KERNELHUB_HALVES 1
#elif defined(__AVX2__) && defined(__F16C__)
inline void widen_half(__m256i half, Vector &low, Vector &high) {
    low = (Vector)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    high = (Vector)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}
inline __m256i load_halves(const char *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline __m256i load_bytes(const char *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline __m256i halves_of_e5m2(__m256i code) { return _mm256_slli_epi16(code, 8); }
inline __m256i halves_of_e4m3(__m256i code) {
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    const __m256i number = _mm256_or_si256(_mm256_slli_epi16(size, 7), nan);
    return _mm256_or_si256(number, _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8));
}
#define KERNELHUB_HALVES 1
#endif

inline float of_e5m2(uint8_t code) { return of_half(static_cast<uint16_t>(code << 8)); }
inline float of_e4m3(uint8_t code) {
    const uint16_t sign = static_cast<uint16_t>((code & 0x80) << 8), size = code & 0x7f;
    return of_half(static_cast<uint16_t>(sign | (size == 0x7f ? 0x7e00 : size << 7))) * 256.0f;
}

struct OfFloat16 {
    static constexpr int64_t BYTES = 2;
    static constexpr bool SLOW = true;  // to widen
    static int64_t place(int64_t d) { return d; }
    static void widen(const char *from, Vector &low, Vector &high) {
#if defined(KERNELHUB_HALVES)
        widen_half(load_halves(from), low, high);
#else
        uint16_t held[2 * WIDE];
        memcpy(held, from, sizeof held);
        for (int i = 0; i < WIDE; i++) low[i] = of_half(held[i]), high[i] = of_half(held[WIDE + i]);
#endif
    }
};

struct OfE5m2 {
    static constexpr int64_t BYTES = 1;
    static constexpr bool SLOW = true;  // to widen
    static int64_t place(int64_t d) { return d; }
    static void widen(const char *from, Vector &low, Vector &high) {
#if defined(KERNELHUB_HALVES)
        widen_half(halves_of_e5m2(load_bytes(from)), low, high);
#else
        uint8_t held[2 * WIDE];
        memcpy(held, from, sizeof held);
        for (int i = 0; i < WIDE; i++) low[i] = of_e5m2(held[i]), high[i] = of_e5m2(held[WIDE + i]);
#endif
    }
};

// By way of bfloat16, whose two bytes are looked up, where a CPU looks up bytes: 0.75 of the time of float16's way.
struct OfE4m3 {
    static constexpr int64_t BYTES = 1;
    static constexpr bool SLOW = true;  // to widen
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI__)
    static int64_t place(int64_t d) { return OfBfloat16::place(d); }
    static void widen(const char *from, Vector &low, Vector &high) {
        const __m512i both = decode(reinterpret_cast<const uint8_t *>(from), ~0u);
        OfBfloat16::widen(reinterpret_cast<const char *>(&both), low, high);
    }
#else
    static int64_t place(int64_t d) { return d; }
    static void widen(const char *from, Vector &low, Vector &high) {
#if defined(KERNELHUB_HALVES)
        widen_half(halves_of_e4m3(load_bytes(from)), low, high);
        low *= 256.0f, high *= 256.0f;
#else
        uint8_t held[2 * WIDE];
        memcpy(held, from, sizeof held);
        for (int i = 0; i < WIDE; i++) low[i] = of_e4m3(held[i]), high[i] = of_e4m3(held[WIDE + i]);
#endif
    }
#endif
};

}  // namespace
