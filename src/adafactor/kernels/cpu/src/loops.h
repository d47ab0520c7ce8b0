// The innermost loops. Each goes once over a stretch of numbers that lie side by side. `tests/kernels/test_loops.py`
// sees to it that the compiler makes vector instructions of all of them: where it cannot, it says nothing.
#pragma once

#include "numbers.h"

#define LOOP _Pragma("omp simd")
#define SUM_LOOP(...) _Pragma(SUM_LOOP_TEXT(omp simd reduction(+ : __VA_ARGS__)))
#define SUM_LOOP_TEXT(text) #text

namespace adafactor {

// ---- first pass: loops that only read G

struct Four {
    float a, b, c, d;
};

// Adds G² of four lines to the columns; returns the sum of each line. Columns are read once for four lines, and memory
// answers four streams at once.
template <class G>
Four squares_of_four(const G* __restrict g0, const G* __restrict g1, const G* __restrict g2, const G* __restrict g3,
                     float* __restrict col, int64_t n) {
    float t0 = 0, t1 = 0, t2 = 0, t3 = 0;
    SUM_LOOP(t0, t1, t2, t3)
    for (int64_t j = 0; j < n; ++j) {
        const float a0 = load(g0[j]), a1 = load(g1[j]), a2 = load(g2[j]), a3 = load(g3[j]);
        t0 = multiply_add(a0, a0, t0);
        t1 = multiply_add(a1, a1, t1);
        t2 = multiply_add(a2, a2, t2);
        t3 = multiply_add(a3, a3, t3);
        col[j] += squares_of_two(a0, a1) + squares_of_two(a2, a3);
    }
    return {t0, t1, t2, t3};
}

template <class G>
float squares_of_one(const G* __restrict g, float* __restrict col, int64_t n) {
    float total = 0;
    SUM_LOOP(total)
    for (int64_t j = 0; j < n; ++j) {
        const float a = load(g[j]);
        total = multiply_add(a, a, total);
        col[j] = multiply_add(a, a, col[j]);
    }
    return total;
}

// The same where entries of R alternate along the line: `row` has a sum for each of its numbers.
template <class G>
void squares_by_number(const G* __restrict g, float* __restrict row, float* __restrict col, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float a = load(g[j]);
        row[j] = multiply_add(a, a, row[j]);
        col[j] = multiply_add(a, a, col[j]);
    }
}

// Adds (G·r)² of four lines to the columns.
template <class G>
void energies_of_four(const G* __restrict g0, const G* __restrict g1, const G* __restrict g2, const G* __restrict g3,
                      Four r, float* __restrict col, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float u0 = load(g0[j]) * r.a, u1 = load(g1[j]) * r.b, u2 = load(g2[j]) * r.c, u3 = load(g3[j]) * r.d;
        col[j] += squares_of_two(u0, u1) + squares_of_two(u2, u3);
    }
}

template <class G>
void energies_of_one(const G* __restrict g, float r, float* __restrict col, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float u = load(g[j]) * r;
        col[j] = multiply_add(u, u, col[j]);
    }
}

template <class G>
void energies_by_number(const G* __restrict g, const float* __restrict row, float* __restrict col, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float u = load(g[j]) * row[j];
        col[j] = multiply_add(u, u, col[j]);
    }
}

// One element of V̂: β̂₂·v + (1 − β̂₂)·(g² + ε₁), with β̂₂·v as keep·v − fade·v: in float, 1 − β̂₂ near 0 is not lost.
struct Average {
    float keep, fade, w2, eps1;
    INLINE float operator()(float v, float g) const { return (keep * v - fade * v) + w2 * (g * g + eps1); }
};

template <class G>
float energy_of_unfactored(const G* __restrict g, const float* __restrict v, Average average, int64_t n) {
    float total = 0;
    SUM_LOOP(total)
    for (int64_t j = 0; j < n; ++j) {
        const float a = load(g[j]);
        total += a * a / average(v[j], a);
    }
    return total;
}

// ---- tiles: stretches of U, on the way from G to what X moves by

// What X moves by is G·r·c with the scales of its row and column, from left to right: r·c alone may leave float …
template <class G>
struct Direct {
    const G* g;
    float row;
    const float* col;
    INLINE float operator()(int64_t j) const { return load(g[j]) * row * col[j]; }
};

// … where entries of R alternate along a line, too …
template <class G>
struct ByNumber {
    const G* g;
    const float *row, *col;
    INLINE float operator()(int64_t j) const { return load(g[j]) * row[j] * col[j]; }
};

// … or a tile, times a rate.
struct FromTile {
    const float* u;
    float rate;
    INLINE float operator()(int64_t j) const { return u[j] * rate; }
};

template <class G>
void load_tile(const G* __restrict g, float* __restrict u, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) u[j] = load(g[j]);
}

// Fills a tile; `by` may be of the tile itself.
template <class By>
void fill_tile(const By by, float* u, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) u[j] = by(j);
}

// Divides what U is made of, G or a tile, by √V̂ as it will be. V̂ is written to `v`, which may be the state itself.
template <class G, class M>
void divide_tile(const G* g, const M* m, const float* old, float* v, Average average, float scale, float* u,
                 int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float now = average(old[j], load(g[j]));
        u[j] = load(m[j]) / std::sqrt(now) * scale;
        v[j] = now;
    }
}

inline double sum_of_squares(const float* __restrict u, int64_t n) {
    double total = 0;
    SUM_LOOP(total)
    for (int64_t j = 0; j < n; ++j) total += double(u[j]) * double(u[j]);
    return total;
}

// ---- momentum: average the tile into it, and leave it in the tile as it was computed

// old + w·(u − old), or from the other end where w is near 1: in float, 1 − w is not lost.
template <bool NEAR_ONE>
struct Blend {
    float weight;  // w, or 1 − w
    INLINE float operator()(float old, float u) const {
        return NEAR_ONE ? multiply_add(weight, old - u, u) : multiply_add(weight, u - old, old);
    }
};

// Leaves the average in the tile and, in float, in the momentum: if it is not to be written, `kept` is the tile, too.
template <class Average>
void average_in(const float* m, float* kept, float* u, Average blend, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) kept[j] = u[j] = blend(m[j], u[j]);
}

template <class Average>
void average_in(const Bfloat16* __restrict m, float* __restrict u, Average blend, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) u[j] = blend(load(m[j]), u[j]);
}

template <class Average>
void average_in(const int8_t* __restrict m, float scale, float* __restrict u, Average blend, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) u[j] = blend(float(m[j]) * scale, u[j]);
}

template <class Average>
void average_in_at_random(Bfloat16* __restrict m, float* __restrict u, Average blend, Words words, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        u[j] = blend(load(m[j]), u[j]);
        m[j] = store<Bfloat16>(at_random<Bfloat16>(u[j], words.upper_half(j)));
    }
}

// int8: a block of integers with one scale.

constexpr float MOST = 127;        // the largest integer that is used: the negative ones reach as far
constexpr float TINY = 0x1p-100f;  // a block with no larger number is kept as zeros

inline float largest_of(const float* __restrict u, int64_t n) {
    int32_t most = 0;
    _Pragma("omp simd reduction(max : most)") for (int64_t j = 0; j < n; ++j) {
        const int32_t size = size_of(u[j]);
        most = size > most ? size : most;
    }
    const float largest = float_of(uint32_t(most));
    return largest < TINY ? 0.0f : largest;
}

// The integers at or below u·inverse + chance.
inline void encode_at_random(const float* __restrict u, int8_t* __restrict m, float inverse, Words words, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) {
        const float chance = float(int32_t(words.upper_half(j))) * 0x1p-16f;
        const int32_t below = int32_t(std::floor(u[j] * inverse + chance));
        m[j] = int8_t(std::clamp(below, -int32_t(MOST), int32_t(MOST)));
    }
}

// ---- last pass: the loops that step X: X·decay − what it moves by

template <class X>
struct Nearest {
    INLINE float operator()(float value, int64_t) const { return nearest<X>(value); }
};

template <class X>
struct AtRandom {
    Words words;
    INLINE float operator()(float value, int64_t j) const { return at_random<X>(value, words(j)); }
};

struct Squares {
    float before, after;
};

// Each returns ΣX² before and after, by one loop and so in one order of additions: what a step finds has the bits of
// what the last one left. Where nothing was left, `measure` (last_pass.h) runs the same loop on a copy of X. For that
// it must be the same machine code: SAME_CODE forbids the compiler to make several versions.
#if defined(_MSC_VER)
#define SAME_CODE __declspec(noinline)
#elif defined(__clang__)
#define SAME_CODE __attribute__((noinline))
#else
#define SAME_CODE __attribute__((noinline, noclone))
#endif

template <class X, class By, class Round>
SAME_CODE Squares descend(X* __restrict x, const By by, const Round round, float decay, int64_t n) {
    float before = 0, after = 0;
    SUM_LOOP(before, after)
    for (int64_t j = 0; j < n; ++j) {
        const float old = load(x[j]);
        const float now = round(multiply_add(old, decay, -by(j)), j);
        x[j] = store<X>(now);
        before = multiply_add(old, old, before);
        after = multiply_add(now, now, after);
    }
    return {before, after};
}

// Two lines at a time, which lie far apart: memory answers more streams at once, and the sums are two chains.
template <class X, class By, class Round>
SAME_CODE Squares descend_two(X* __restrict x0, X* __restrict x1, const By by0, const By by1, const Round round0,
                              const Round round1, float decay, int64_t n) {
    float before = 0, after = 0;
    SUM_LOOP(before, after)
    for (int64_t j = 0; j < n; ++j) {
        const float old0 = load(x0[j]), old1 = load(x1[j]);
        const float now0 = round0(multiply_add(old0, decay, -by0(j)), j),
                    now1 = round1(multiply_add(old1, decay, -by1(j)), j);
        x0[j] = store<X>(now0);
        x1[j] = store<X>(now1);
        before += squares_of_two(old0, old1);
        after += squares_of_two(now0, now1);
    }
    return {before, after};
}

// One stretch with Kahan's compensation: what rounding takes away is kept, and given back before the next step.
template <class X>
SAME_CODE Squares descend_compensated(X* __restrict x, X* __restrict kept, const FromTile by, float decay, int64_t n) {
    float before = 0, after = 0;
    SUM_LOOP(before, after)
    for (int64_t j = 0; j < n; ++j) {
        const float old = load(x[j]), value = multiply_add(old + remainder(kept[j], old), decay, -by(j));
        const float now = nearest<X>(value);
        x[j] = store<X>(now);
        kept[j] = store<X>(nearest<X>(lost(value, now)));
        before = multiply_add(old, old, before);
        after = multiply_add(now, now, after);
    }
    return {before, after};
}

// ---- vectors

inline void invert_roots(float* __restrict values, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) values[j] = 1 / std::sqrt(values[j]);
}

inline double sum_of(const double* __restrict values, int64_t n) {
    double total = 0;
    SUM_LOOP(total)
    for (int64_t j = 0; j < n; ++j) total += values[j];
    return total;
}

template <class T>
void fill_with_zeros(T* values, int64_t n) {
    std::memset(values, 0, size_t(n) * sizeof(T));
}

}  // namespace adafactor
