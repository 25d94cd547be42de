// Products of bfloat16 on AMX: 16 rows of activations by 64 rows of weights, whose pairs are in a panel of product.h.
//
// A core of Sapphire Rapids multiplies 16 x 32 by 32 x 16 bfloat16 in 16 cycles, eight times what its AVX-512 does. The
// operating system gives a process the registers on request, so whether they are there is found out by asking.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__linux__) && !defined(KERNELHUB_NO_AMX) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define KERNELHUB_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KERNELHUB_WITH_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace {

constexpr int64_t TILE_ROWS = 16;   // of a
constexpr int64_t TILE_PAIRS = 16;  // of columns

inline bool ask_for_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d >> 24 & 1) || !(d >> 22 & 1)) return false;  // AMX-TILE, AMX-BF16
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;     // ARCH_REQ_XCOMP_PERM of Linux 5.16
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline bool has_amx() {
    static const bool has = ask_for_amx();
    return has;
}

// What is at an address is in memory from here on. Of what the instructions of tiles read, g++ is told 8 bytes or nothing:
// version 12 left out the others where it saw that nobody else reads them.
inline void written(const void *at) { asm volatile("" : : "r"(at) : "memory"); }

// The registers of a thread: 0 to 3 are sums, 4 rows of a, 5 to 7 parts of a panel; all of 16 rows of 64 bytes. They are
// given back, since a thread that keeps them is slower to switch.
struct Tiles {
    const bool used;

    KERNELHUB_WITH_AMX explicit Tiles(bool wanted) : used(wanted) {
        if (!used) return;
        alignas(64) uint8_t shapes[64] = {};
        shapes[0] = 1;
        for (int tile = 0; tile < 8; tile++) {
            shapes[16 + 2 * tile] = 64;
            shapes[48 + tile] = TILE_ROWS;
        }
        written(shapes);
        _tile_loadconfig(shapes);
    }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
    KERNELHUB_WITH_AMX ~Tiles() {
        if (used) _tile_release();
    }
};

// sums[16][64] = 16 rows of a, `a_bytes` apart, by the pairs of a panel, `panel_bytes` from pair to pair; `pairs` is a
// multiple of 16.
KERNELHUB_WITH_AMX inline void multiply_tiles(const void *a, int64_t a_bytes, const uint32_t *panel, int64_t panel_bytes,
                                              int64_t pairs, float *sums) {
    written(a), written(panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < pairs; p += TILE_PAIRS) {
        const char *right = reinterpret_cast<const char *>(panel) + p * panel_bytes;
        _tile_loadd(4, static_cast<const char *>(a) + 4 * p, a_bytes);
        _tile_loadd(5, right, panel_bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, right + 64, panel_bytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, right + 128, panel_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, right + 192, panel_bytes);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + 16, 256);
    _tile_stored(2, sums + 32, 256);
    _tile_stored(3, sums + 48, 256);
}

}  // namespace
#endif
