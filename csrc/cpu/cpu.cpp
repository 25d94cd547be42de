// Which of a wheel's libraries this CPU can run. The answer is asked of the one that every CPU runs.

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

// __builtin_cpu_supports asks the compiler's own library, and that of Zig's C++ compiler (0.17) says no to everything.
struct Cpu {
    unsigned basic = 0, more = 0, last = 0, newer = 0;  // leaf 1 in ecx; leaf 7 in ebx and ecx; its second part in eax
    uint64_t kept = 0;                                  // registers that the operating system keeps for each thread

    Cpu() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        basic = c;
        if (!has(basic, 27)) return;  // OSXSAVE
        asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        kept = a | static_cast<uint64_t>(d) << 32;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        more = b, last = c;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) newer = a;
    }

    static bool has(unsigned word, int bit) { return word >> bit & 1; }
    bool keeps(uint64_t registers) const { return (kept & registers) == registers; }

    bool has_avx2() const {  // with FMA and F16C
        constexpr uint64_t YMM = 0x6;
        return keeps(YMM) && has(basic, 12) && has(basic, 28) && has(basic, 29) && has(more, 5);
    }
    bool has_avx512() const {  // F, DQ, CD, BW, VL
        constexpr uint64_t ZMM = 0xe6;
        return keeps(ZMM) && has(more, 16) && has(more, 17) && has(more, 28) && has(more, 30) && has(more, 31);
    }
    bool has_avx512_bf16() const { return has(newer, 5) && has(last, 1); }  // with VBMI
};

}  // namespace
#endif

extern "C" {

// 0 base, 1 AVX2 with FMA and F16C, 2 AVX-512, 3 AVX-512 with BF16 and VBMI: the order of LEVELS in setup.py.
int64_t kernelhub_cpu_level() {
#if defined(__x86_64__)
    const Cpu cpu;
    if (!cpu.has_avx2()) return 0;
    if (!cpu.has_avx512()) return 1;
    return cpu.has_avx512_bf16() ? 3 : 2;
#else
    return 0;
#endif
}
}
