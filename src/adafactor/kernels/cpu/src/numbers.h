// Single numbers: the types in which they are stored, how they are rounded, and the random words for that.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(_MSC_VER)
#define INLINE __forceinline
#else
#define INLINE inline __attribute__((always_inline))  // a call in a loop would keep it from being vectorised
#endif

namespace adafactor {

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The bits without the sign: numbers are ordered as these are, and a NaN is above all others. They are signed, because
// g++ does not vectorise a choice by an unsigned comparison.
INLINE int32_t size_of(float value) { return int32_t(bits_of(value) & 0x7FFFFFFF); }

// A mask, all ones where a < b; of numbers that are not negative. Arithmetic, as a comparison may become a branch, and
// that would keep a loop from being vectorised.
INLINE int32_t less(int32_t a, int32_t b) { return (a - b) >> 31; }

INLINE int32_t choose(int32_t mask, int32_t yes, int32_t no) { return (yes & mask) | (no & ~mask); }

INLINE float with_sign_of(float value, int32_t size) {
    return float_of((bits_of(value) & 0x80000000) | uint32_t(size));
}

// a·b + c, rounded once where the processor has an instruction for that. Nothing else is: with -ffp-contract=off the
// bits are what the source says, so that copies of a factor on several ranks do not differ.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float squares_of_two(float a, float b) { return multiply_add(a, a, b * b); }

// ---- stored types. They are not structs: g++ would not vectorise loops over those.

enum class Bfloat16 : uint16_t {};  // the upper half of a float
enum class Float16 : uint16_t {};   // 5 bits of exponent, 10 of mantissa

constexpr int32_t INFINITE = 0x7F800000;
constexpr int32_t LARGEST_HALF = 0x477FE000;          // 65504
constexpr int32_t SMALLEST_NORMAL_HALF = 0x38800000;  // 2⁻¹⁴
constexpr float SMALLEST_HALF = 0x1p-24f;

// Gives the number to compute with.
INLINE float load(float x) { return x; }
INLINE float load(Bfloat16 x) { return float_of(uint32_t(x) << 16); }
INLINE float load(Float16 x) {  // by way of an integer where it is subnormal: torch can have subnormal floats be zero
    const int32_t size = int32_t(uint16_t(x)) & 0x7FFF;
    const int32_t normal = (size << 13) + choose(less(size, 0x7C00), 0x38000000, 0x70000000);
    const int32_t bits = choose(less(size, 0x400), size_of(float(size) * SMALLEST_HALF), normal);
    return float_of(uint32_t(bits) | (uint32_t(x) & 0x8000) << 16);
}

// Keeps a number that has been rounded.
template <class T>
T store(float rounded);
template <>
INLINE float store(float rounded) {
    return rounded;
}
template <>
INLINE Bfloat16 store(float rounded) {
    return Bfloat16(bits_of(rounded) >> 16);
}
template <>
INLINE Float16 store(float rounded) {
    const int32_t size = size_of(rounded), normal = (size >> 13) - (112 << 10);
    const int32_t subnormal = int32_t(bits_of(float_of(uint32_t(size)) + 0.5f) - bits_of(0.5f));
    const int32_t special = choose(less(INFINITE, size), 0x7E00, 0x7C00);
    const int32_t half =
        choose(less(size, SMALLEST_NORMAL_HALF), subnormal, choose(less(LARGEST_HALF, size), special, normal));
    return Float16(uint32_t(half) | (bits_of(rounded) >> 16 & 0x8000));
}

// ---- roundings: from a number to one that is stored without loss

template <class T>
float nearest(float value);
template <>
INLINE float nearest<float>(float value) {
    return value;
}
template <>
INLINE float nearest<Bfloat16>(float value) {  // a NaN stays one: no computed NaN has all the bits that would overflow
    const uint32_t bits = bits_of(value);
    return float_of((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000);
}
template <>
INLINE float nearest<Float16>(float value) {
    const int32_t size = size_of(value);
    const int32_t normal = int32_t((uint32_t(size) + 0xFFF + (uint32_t(size) >> 13 & 1)) & 0xFFFFE000);
    const int32_t subnormal = size_of((float_of(uint32_t(size)) + 0.5f) - 0.5f);
    const int32_t special = choose(less(INFINITE, size), 0x7FC00000, INFINITE);
    const int32_t large = choose(less(size, 0x477FF000), normal, special);  // from 65520 on
    return with_sign_of(value, choose(less(size, SMALLEST_NORMAL_HALF), subnormal, large));
}

// One of the two neighbours: the upper one where the lower half of the word says so.
template <class T>
float at_random(float value, uint32_t word);
template <>
INLINE float at_random<Bfloat16>(float value, uint32_t word) {
    return float_of((bits_of(value) + (word & 0xFFFF)) & 0xFFFF0000);
}
template <>
INLINE float at_random<Float16>(float value, uint32_t word) {
    const int32_t size = size_of(value), normal = int32_t((uint32_t(size) + (word & 0x1FFF)) & 0xFFFFE000);
    const int32_t wide = size_of(float_of(uint32_t(size)) * 0x1p24f), most = 0x44800000;  // 1024
    const float units = float_of(uint32_t(choose(less(wide, most), wide, most))), below = float(int32_t(units));
    const float chance = float(int32_t(word >> 8)) * 0x1p-24f;
    const int32_t up = int32_t(bits_of(chance - (units - below)) >> 31);  // 1 where the chance is less
    const float subnormal = (below + float(up)) * SMALLEST_HALF;
    const int32_t large = choose(less(LARGEST_HALF, size), size_of(nearest<Float16>(value)), normal);
    return with_sign_of(value, choose(less(size, SMALLEST_NORMAL_HALF), size_of(subnormal), large));
}

// ---- what Kahan's summation keeps of a rounding

template <class T>
constexpr float HALF_UNIT = 0x1p-8f;  // of a bfloat16 between 1 and 2, in its last place
template <>
constexpr float HALF_UNIT<Float16> = 0x1p-11f;

// What rounding took away from x; nothing where it is too much for that x, which was written over since.
template <class T>
INLINE float remainder(T kept, float x) {
    const float power_of_two = float_of(bits_of(x) & 0x7F800000);
    return std::fabs(load(kept)) <= power_of_two * HALF_UNIT<T> ? load(kept) : 0.0f;
}

INLINE float lost(float value, float rounded) { return std::fabs(rounded) <= 3.4028235e38f ? value - rounded : 0.0f; }

// ---- random words: not drawn but computed, of the parameter, the step and the number of the element

struct Keys {
    uint32_t first, second;
};

// All but the last mixing, h ^ (h >> 16), which leaves the upper half as it is.
INLINE uint32_t mix(uint32_t h, uint32_t salt) {
    h = (h ^ (h >> 16)) * 0x7FEB352D ^ salt;
    return (h ^ (h >> 15)) * 0x846CA68B;
}

// The words of a stretch of elements, whose numbers in the whole parameter are below 2³².
struct Words {
    uint32_t first, salt, second_key;

    Words(int64_t element, Keys keys) : first(uint32_t(element)), salt(keys.first), second_key(keys.second) {}

    INLINE uint32_t operator()(int64_t j) const {
        const uint32_t h = mixed(j);
        return h ^ (h >> 16);
    }

    // The upper half of that word alone.
    INLINE uint32_t upper_half(int64_t j) const { return mixed(j) >> 16; }

    INLINE uint32_t mixed(int64_t j) const { return mix((first + uint32_t(j)) ^ salt, second_key); }
};

}  // namespace adafactor
