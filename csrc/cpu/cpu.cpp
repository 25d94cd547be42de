// Which of a wheel's libraries this CPU can run. The answer is asked of the one that every CPU runs.

#include <cstdint>

extern "C" {

// 0 base, 1 AVX2 with FMA and F16C, 2 AVX-512, 3 AVX-512 with BF16 and VBMI: the order of LEVELS in setup.py.
int64_t kernelhub_cpu_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();  // asks the operating system, too, whether it keeps the registers
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512cd"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") ? 3 : 2;
#else
    return 0;
#endif
}
}
