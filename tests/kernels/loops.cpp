// Entry points to the innermost loops for `test_loops.py`, which compiles this.
#include "last_pass.h"

using namespace adafactor;

#define ENTRY extern "C" void

template <class T>
static void convert(const float* values, T* stored, float* loaded, int64_t n) {
    LOOP
    for (int64_t j = 0; j < n; ++j) stored[j] = store<T>(nearest<T>(values[j]));
    load_tile(stored, loaded, n);
}

template <class T>
static void draw(const float* values, T* stored, int64_t first, const uint32_t* keys, int64_t n) {
    const Words words = {first, {keys[0], keys[1]}};
    LOOP
    for (int64_t j = 0; j < n; ++j) stored[j] = store<T>(at_random<T>(values[j], words(j)));
}

ENTRY convert_float32(const float* values, float* stored, float* loaded, int64_t n) {
    convert(values, stored, loaded, n);
}
ENTRY convert_bfloat16(const float* values, Bfloat16* stored, float* loaded, int64_t n) {
    convert(values, stored, loaded, n);
}
ENTRY convert_float16(const float* values, Float16* stored, float* loaded, int64_t n) {
    convert(values, stored, loaded, n);
}

ENTRY draw_bfloat16(const float* v, Bfloat16* s, int64_t first, const uint32_t* keys, int64_t n) {
    draw(v, s, first, keys, n);
}
ENTRY draw_float16(const float* v, Float16* s, int64_t first, const uint32_t* keys, int64_t n) {
    draw(v, s, first, keys, n);
}

ENTRY encode(const float* values, int8_t* stored, float* scale, int64_t first, const uint32_t* keys, int64_t n) {
    const float largest = largest_of(values, n), inverse = largest > 0 ? MOST / largest : 0.0f;
    *scale = largest / MOST;
    encode_at_random(values, stored, inverse, {first, {keys[0], keys[1]}}, n);
}
