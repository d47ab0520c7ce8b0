// A job: one tensor, as Python describes it, and how it is cut into chunks and stretches.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace adafactor {

enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Momentum : int64_t { NONE, IN_FLOAT32, IN_BFLOAT16, IN_INT8 };
enum MomentumOf : int64_t { OF_UPDATE, OF_GRADIENT, OF_DIRECTION };
enum Rounding : int64_t { NEAREST, STOCHASTIC, KAHAN };

// Calls use(number of that type).
template <class Use>
void with_type(int64_t type, const Use& use) {
    if (type == FLOAT32) use(float());
    if (type == BFLOAT16) use(Bfloat16());
    if (type == FLOAT16) use(Float16());
}

// The record, field by field. Python makes a NumPy type of the same list (`adafactor_fields`).
//
// In memory a tensor is `batch` × `rows` × `parts` lines of `cols` numbers side by side, without gaps. A factored one
// is many matrices: in each of them rows are along `rows` and columns along a line, every `period` numbers. (A
// convolution of n × m × 3 × 3 has n rows and lines of 9·m numbers; its R and C have an entry for each of the 9.) An
// unfactored tensor is one line. An address is 0 where the tensor has no such thing.
// clang-format off
#define JOB_FIELDS(INTEGER, NUMBER)                                                                             \
    INTEGER(batch) INTEGER(rows) INTEGER(parts) INTEGER(cols) INTEGER(period) INTEGER(factored)                 \
    INTEGER(x_type) INTEGER(g_type) INTEGER(rounding)                                                           \
    INTEGER(momentum) INTEGER(momentum_of) INTEGER(block) /* int8: numbers with one scale */                    \
    INTEGER(measures_x) INTEGER(relative) INTEGER(decays_by_alpha) INTEGER(ignores_nonfinite)                   \
    INTEGER(needs_second_pass) /* ΣU² cannot be had from the first one */                                       \
    INTEGER(swapped)           /* the paper's R is along a line here, and C along the rows */                   \
    NUMBER(n_rows) NUMBER(n_cols) NUMBER(count) /* of the whole tensor, of which this may be a shard */         \
    NUMBER(eps1) NUMBER(eps2) NUMBER(clip) NUMBER(sign)                                                         \
    INTEGER(x) INTEGER(g) INTEGER(t) INTEGER(row) INTEGER(col) INTEGER(full)                                    \
    INTEGER(row_offsets) INTEGER(col_offsets) /* where the state has another order than memory */               \
    INTEGER(mean_row) /* mean(R) of each matrix, where other ranks have a part in it */                         \
    INTEGER(m) INTEGER(m_scales) INTEGER(compensation)                                                          \
    /* an element's number in the whole: of the first one, and what is added along batch, rows and parts */     \
    INTEGER(origin) INTEGER(number_batch) INTEGER(number_rows) INTEGER(number_parts)                            \
    /* this step */                                                                                             \
    INTEGER(present) NUMBER(beta2) NUMBER(w1) NUMBER(w2) NUMBER(rho) NUMBER(share) INTEGER(key1) INTEGER(key2)  \
    /* what it found, and with what it multiplies: X·decay − rate·M, with G·r·c·scale averaged into M */        \
    INTEGER(finite) INTEGER(taken) INTEGER(takes_second_pass) NUMBER(u2) NUMBER(x2) NUMBER(rms_u) NUMBER(rms_x) \
    NUMBER(alpha) NUMBER(scale) NUMBER(rate) NUMBER(decay)                                                      \
    NUMBER(x2_after) /* ΣX² for the next step; NaN if unknown */                                                \
    INTEGER(steps) INTEGER(clipped) INTEGER(skipped) NUMBER(beta2_taken) /* for the report */                   \
    INTEGER(scratch) INTEGER(row_sums) INTEGER(col_sums) /* memory for the step's vectors, and two of those */
// clang-format on

#define AS_INTEGER(name) int64_t name;
#define AS_NUMBER(name) double name;

struct Job {
    JOB_FIELDS(AS_INTEGER, AS_NUMBER)

    int64_t lines() const { return batch * rows * parts; }
    int64_t width() const { return parts * cols; }  // of all lines of a row
    int64_t elements() const { return lines() * cols; }
    int64_t row_count() const { return factored ? lines() * period : 0; }  // entries of R
    int64_t col_count() const { return factored ? batch * width() : 0; }   // and of C
    int64_t matrices() const { return factored ? batch * parts * period : 0; }
};

template <class T>
T* at(int64_t address, int64_t index = 0) {
    return reinterpret_cast<T*>(address) + index;
}

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- chunks: the least that a thread takes. They depend on nothing but the shape, so neither do the sums' bits.

constexpr int64_t TILE = 512;        // numbers that are worked on at a time: they stay in the first-level cache
constexpr int64_t WIDTH = 2048;      // squares of a line that are added in float, then in double
constexpr int64_t CHUNK = 1 << 15;   // elements of a chunk, at least
constexpr int64_t TALLEST = 512;     // its rows, if there are not too many chunks: each has sums for all columns
constexpr int64_t MOST_CHUNKS = 16;  // of wide matrices; of tall ones, so many that their sums take memory of O(n + m)

struct Chunk {
    int64_t number, batch;  // its own number, and that of its batch
    int64_t start, stop;    // rows of its batch; of an unfactored tensor, tiles
};

// Rows (of an unfactored tensor: tiles) in a chunk.
inline int64_t rows_per_chunk(const Job& job) {
    if (!job.factored) return CHUNK / TILE;
    const int64_t wanted = std::clamp<int64_t>(job.rows * job.width() / CHUNK, 1, std::max<int64_t>(1, job.rows / 64));
    const int64_t tall = std::min(divided_up(job.rows, TALLEST), MOST_CHUNKS + MOST_CHUNKS * job.rows / job.width());
    const int64_t chunks = std::max(std::min(wanted, MOST_CHUNKS), job.rows * job.width() > CHUNK ? tall : 1);
    return divided_up(divided_up(job.rows, chunks), 4) * 4;
}

inline int64_t rows_or_tiles(const Job& job) { return job.factored ? job.rows : divided_up(job.cols, TILE); }
inline int64_t chunks_per_batch(const Job& job) { return divided_up(rows_or_tiles(job), rows_per_chunk(job)); }
inline int64_t chunks_of(const Job& job) { return job.batch * chunks_per_batch(job); }

inline Chunk chunk_at(const Job& job, int64_t number) {
    const int64_t each = chunks_per_batch(job), rows = rows_per_chunk(job), start = number % each * rows;
    return {number, number / each, start, std::min(rows_or_tiles(job), start + rows)};
}

// ---- stretches: numbers side by side that are stepped at a time

// Whether X moves by G·r·c itself: nothing comes between. float16 goes by way of tiles, too: loops with pairs of types
// are many, and who trains in it does not train on a CPU.
inline bool is_direct(const Job& job) {
    const bool has_half = job.x_type == FLOAT16 || job.g_type == FLOAT16;
    return job.factored && !job.momentum && job.rounding != KAHAN && !has_half;
}

// The longest stretch: whole periods and whole blocks, so that every stretch begins with one.
inline int64_t longest_stretch(const Job& job) {
    if (is_direct(job) && job.period == 1) return WIDTH;
    const int64_t unit = job.momentum == IN_INT8 ? job.block : job.period;
    return TILE / unit * unit;
}

// From column `start` of a line on: element i of the tensor, to which entry `col` of C belongs, with a number.
struct Stretch {
    int64_t line, start, n, i, col, number;
};

inline Stretch stretch_at(const Job& job, int64_t batch, int64_t row, int64_t part, int64_t start, int64_t longest) {
    const int64_t line = (batch * job.rows + row) * job.parts + part;
    const int64_t number = job.origin + batch * job.number_batch + row * job.number_rows + part * job.number_parts;
    return {line,
            start,
            std::min(longest, job.cols - start),
            line * job.cols + start,
            (batch * job.parts + part) * job.cols + start,
            number + start};
}

// Goes through a chunk, always in the same order: one(stretch) for every stretch, or, where X moves directly,
// two(stretch, stretch) for those of two rows half a chunk apart, and one(stretch) for the row that is left.
template <class One, class Two>
void for_each_stretch(const Job& job, Chunk chunk, const One& one, const Two& two) {
    const int64_t longest = longest_stretch(job);
    if (!job.factored) {
        const int64_t stop = std::min(job.cols, chunk.stop * TILE);
        for (int64_t j = chunk.start * TILE; j < stop; j += longest) {
            Stretch stretch = stretch_at(job, 0, 0, 0, j, longest);
            stretch.n = std::min(stretch.n, stop - j);
            one(stretch);
        }
        return;
    }
    const int64_t half = is_direct(job) && job.period == 1 ? (chunk.stop - chunk.start) / 2 : 0;
    const auto cut = [&](int64_t row, int64_t part, int64_t j) {
        return stretch_at(job, chunk.batch, row, part, j, longest);
    };
    for (int64_t row = chunk.start; row < chunk.start + half; ++row)
        for (int64_t part = 0; part < job.parts; ++part)
            for (int64_t j = 0; j < job.cols; j += longest) two(cut(row, part, j), cut(row + half, part, j));
    for (int64_t row = chunk.start + 2 * half; row < chunk.stop; ++row)
        for (int64_t part = 0; part < job.parts; ++part)
            for (int64_t j = 0; j < job.cols; j += longest) one(cut(row, part, j));
}

inline Words words_of(const Job& job, Stretch part) { return {part.number, {uint32_t(job.key1), uint32_t(job.key2)}}; }

// ---- scratch: the vectors of a step

struct ChunkSums {
    double u2, x2_before, x2_after;
};

struct Scratch {
    ChunkSums* sums;    // of each chunk
    double *row, *col;  // sums of G², then means of G² + ε₁, then R and C as they will be
    double* mean_row;   // mean(R) of each matrix
    float* row_scale;   // 1/√R, and at last with α where the columns' have no room for it
    float* col_scale;   // √mean(R)/√C, and at last with α
    float* squares;     // ΣG² of a chunk's columns (chunks × width)
    float* energies;    // ΣG²/R of them
    int64_t end;
};

inline Scratch scratch_of(const Job& job) {
    int64_t next = job.scratch;
    const auto take = [&next](int64_t bytes) {
        const int64_t address = next;
        next += divided_up(bytes, 64) * 64;
        return address;
    };
    const int64_t columns = job.factored ? chunks_of(job) * job.width() : 0;
    Scratch s = {};
    s.sums = at<ChunkSums>(take(chunks_of(job) * sizeof(ChunkSums)));
    s.row = at<double>(take(job.row_count() * sizeof(double)));
    s.col = at<double>(take(job.col_count() * sizeof(double)));
    s.mean_row = at<double>(take(job.matrices() * sizeof(double)));
    s.row_scale = at<float>(take(job.row_count() * sizeof(float)));
    s.col_scale = at<float>(take(job.col_count() * sizeof(float)));
    s.squares = at<float>(take(columns * sizeof(float)));
    s.energies = at<float>(take(job.needs_second_pass ? 0 : columns * sizeof(float)));
    s.end = next;
    return s;
}

inline int64_t bytes_of_scratch(Job job) {
    job.scratch = 0;
    return scratch_of(job).end;
}

}  // namespace adafactor
