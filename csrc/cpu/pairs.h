// Codes of eight bits and what they mean; pairs of bfloat16, which AVX-512 BF16 and AMX multiply, in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// What a byte means as e4m3, as e8m0: 2^(byte - 127), 255 is NaN, and an eighth of that. Codes of mxfp4 are multiplied by
// eighths: 6 x 2^127 is no float. Their sums are multiplied by 8 (`b_scale`).
struct Meanings {
    float e4m3[256], e8m0[256], eighth[256];

    Meanings() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            const uint32_t power = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23;
            memcpy(&e8m0[byte], &power, 4);
            eighth[byte] = e8m0[byte] * 0.125f;
            const uint32_t size = byte & 0x7f;
            float value = size < 8 ? static_cast<float>(size) * 0.001953125f : 0.0f;  // 2^-9
            if (size >= 8) {
                const uint32_t bits = size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23);
                memcpy(&value, &bits, 4);
            }
            e4m3[byte] = byte & 0x80 ? -value : value;
        }
    }
};
const Meanings MEANING;

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline __m256i load_codes(const uint8_t *codes, __mmask32 kept) {
    // A masked load where none is needed took seven times as long from memory that other programs use too.
    if (kept == ~0u) return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes));
    return _mm256_maskz_loadu_epi8(kept, codes);
}

#if defined(__AVX512VBMI__)

// The two bytes of each of the 128 bfloat16 that codes without a sign stand for.
struct Halves {
    alignas(64) uint8_t low[128], high[128];

    Halves() {
        for (int code = 0; code < 128; code++) {
            uint32_t bits;
            memcpy(&bits, &MEANING.e4m3[code], 4);
            low[code] = static_cast<uint8_t>(bits >> 16);
            high[code] = static_cast<uint8_t>(bits >> 24);
        }
    }
};
const Halves HALVES;

// 64 codes as bfloat16, exactly: the first 8 codes of each 128 bits, and the others.
inline void decode_halves(__m512i codes, __m512i &first, __m512i &second) {
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.low), codes, _mm512_load_si512(HALVES.low + 64));
    const __m512i size =
        _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.high), codes, _mm512_load_si512(HALVES.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
}

// 32 codes as bfloat16, exactly.
inline __m512i decode(const uint8_t *codes, __mmask32 kept) {
    const __m512i twice = _mm512_set_epi64(0x1f1f1e1e1d1d1c1c, 0x1b1b1a1a19191818, 0x1717161615151414, 0x1313121211111010,
                                           0x0f0f0e0e0d0d0c0c, 0x0b0b0a0a09090808, 0x0707060605050404, 0x0303020201010000);
    const __m512i both = _mm512_permutexvar_epi8(twice, _mm512_castsi256_si512(load_codes(codes, kept)));
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.low), both, _mm512_load_si512(HALVES.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.high), both, _mm512_load_si512(HALVES.high + 64));
    const __m512i size = _mm512_mask_mov_epi8(low, 0xaaaaaaaaaaaaaaaa, high);
    return _mm512_ternarylogic_epi32(size, both, _mm512_set1_epi16(static_cast<int16_t>(0x8000)),
                                     0xf8);  // size | both & bit
}

#else

// 32 codes, each in 16 bits, as bfloat16, exactly: exponents are biased by 120 more; the 8 smallest come from a table.
inline __m512i decode_wide(__m512i wide) {
    const __m512i subnormal =
        _mm512_castsi128_si512(_mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
    const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 tiny = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, tiny, size, subnormal);
    const __mmask32 nan = _mm512_cmpeq_epu16_mask(size, _mm512_set1_epi16(0x7f));
    value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8));
}

// 64 codes: the first 8 codes of each 128 bits, and the others.
inline void decode_halves(__m512i codes, __m512i &first, __m512i &second) {
    first = decode_wide(_mm512_unpacklo_epi8(codes, _mm512_setzero_si512()));
    second = decode_wide(_mm512_unpackhi_epi8(codes, _mm512_setzero_si512()));
}

inline __m512i decode(const uint8_t *codes, __mmask32 kept) {
    return decode_wide(_mm512_cvtepu8_epi16(load_codes(codes, kept)));
}

#endif

inline __mmask32 up_to(int64_t left) { return left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0; }

// Of four times four vectors the quarters: quarter j of vector 4 i + m becomes quarter i of vector 4 j + m.
inline void transpose_quarters(__m512i r[16]) {
    __m512i t[16];
    for (int j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// 16 rows of 16 pairs become 16 pairs of 16 rows.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    transpose_quarters(r);
}

// 16 rows of 64 bytes become 16 times 4 bytes of 16 rows. Of rows 4 i .. 4 i + 3 there are 128 bits: two bytes of each,
// then the two others of each.
inline void transpose_codes(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi32(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi32(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi32(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi32(t[4 * i + 1], t[4 * i + 3]);
    }
    transpose_quarters(r);
}

#endif

}  // namespace
