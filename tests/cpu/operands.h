// Operands as an adversary lays them out: memory ends with the last element that may be read, addresses are offset, what
// lies between elements is NaN; and what numbers mean, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

enum Kind : int64_t { BFLOAT16, FLOAT16, FLOAT32, FLOAT8_E4M3, FLOAT8_E5M2 };  // as in csrc/cpu/numbers.h

inline int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind >= FLOAT8_E4M3 ? 1 : 2; }

struct Random {
    uint64_t state;

    explicit Random(uint64_t seed) : state(seed * 2 + 1) {}
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    int64_t below(int64_t end) { return bits() % end; }
};

// sign, exponent and mantissa of so many bits
inline double number(uint32_t bits, int exponent_bits, int mantissa_bits, int bias) {
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), most = (1 << exponent_bits) - 1;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
    if (exponent == most && exponent_bits == 5) return mantissa ? NAN : sign * INFINITY;
    if (exponent_bits == 4 && exponent == most && mantissa == 7) return NAN;
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return sign * (exponent ? std::ldexp(1.0 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias));
}

inline double value_of(int64_t kind, const void *at) {
    uint32_t bits = 0;
    memcpy(&bits, at, bytes_of(kind));
    switch (kind) {
        case FLOAT16:
            return number(bits, 5, 10, 15);
        case FLOAT8_E4M3:
            return number(bits, 4, 3, 7);
        case FLOAT8_E5M2:
            return number(bits, 5, 2, 15);
        default:
            break;
    }
    if (kind == BFLOAT16) bits <<= 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline double e8m0(uint8_t code) { return code == 255 ? NAN : std::ldexp(1.0, code - 127); }

inline double e2m1(int code) {
    static const double sizes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

// Relative error of rounding to the kind.
inline double rounding(int64_t kind) { return kind == BFLOAT16 ? 0x1p-8 : kind == FLOAT16 ? 0x1p-11 : 0x1p-24; }

// Memory of exactly so many elements, behind an offset of as many; bytes are 0xff until they are set.
template <class T>
struct Memory {
    char *held;
    T *data;
    int64_t count;

    explicit Memory(int64_t elements, int64_t offset = 0) : count(elements) {
        const size_t size = (elements + offset) * sizeof(T);
        held = static_cast<char *>(malloc(size ? size : 1));
        memset(held, 0xff, size);
        data = reinterpret_cast<T *>(held) + offset;
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() { free(held); }

    T &operator[](int64_t i) { return data[i]; }
    const T &operator[](int64_t i) const { return data[i]; }
};

// A tensor of numbers with strides in elements. Memory ends with `last`, the place of its last element that is used.
struct Tensor {
    int64_t kind;
    std::vector<int64_t> strides;
    Memory<char> memory;

    Tensor(int64_t of_kind, std::vector<int64_t> steps, int64_t last, int64_t offset)
        : kind(of_kind), strides(std::move(steps)), memory((last + 1) * bytes_of(of_kind), offset * bytes_of(of_kind)) {}

    template <class... Index>
    int64_t place(Index... index) const {
        const int64_t all[] = {static_cast<int64_t>(index)...};
        int64_t sum = 0;
        for (size_t i = 0; i < sizeof...(index); i++) sum += all[i] * strides[i];
        return sum;
    }
    void *address() { return memory.data; }
    double at(int64_t place) const { return value_of(kind, memory.data + place * bytes_of(kind)); }
    void draw(int64_t place, Random &random) {  // from about -4 to 4, every bit of the format in use
        uint32_t bits = random.bits();
        const uint32_t sign = random.bits() & 1, below = static_cast<uint32_t>(random.below(5));
        switch (kind) {
            case BFLOAT16:
                bits = sign << 15 | (125 + below) << 7 | (bits & 0x7f);
                break;
            case FLOAT16:
                bits = sign << 15 | (13 + below) << 10 | (bits & 0x3ff);
                break;
            case FLOAT32:
                bits = sign << 31 | (125 + below) << 23 | (bits & 0x7fffff);
                break;
            case FLOAT8_E4M3:
                bits = sign << 7 | (5 + below) << 3 | (bits & 7);
                break;
            default:
                bits = sign << 7 | (13 + below) << 2 | (bits & 3);
        }
        memcpy(memory.data + place * bytes_of(kind), &bits, bytes_of(kind));
    }
};

// Of a case: how far results are from the reference, and a digest of their bits.
struct Report {
    std::string name;
    double worst = 0.0;  // of the errors, as shares of what is allowed
    uint64_t digest = 1469598103934665603u;
    bool wrong = false;
    bool compared = true;  // else only the digest is wanted

    void compare(double got, double want, double allowed) {
        if (std::isnan(got) || std::isinf(want)) {
            if (got != want) wrong = true;
        } else {
            worst = std::max(worst, std::fabs(got - want) / allowed);
            if (!(std::fabs(got - want) <= allowed)) wrong = true;
        }
    }
    void add(const void *memory, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i++) digest = (digest ^ static_cast<const uint8_t *>(memory)[i]) * 1099511628211u;
    }
    void require(bool condition, const char *what) {
        if (!condition) {
            printf("%s: %s\n", name.c_str(), what);
            wrong = true;
        }
    }
};
