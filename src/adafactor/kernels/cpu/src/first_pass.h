// First pass, over G: sums of G² over rows and columns, and what ΣU² needs of G.
//
// With V̂ = R·C/mean(R), and i over rows and j over columns,
//
//     ΣU² = Σᵢⱼ G²ᵢⱼ·mean(R)/(Rᵢ·Cⱼ) = mean(R)·Σⱼ (Σᵢ G²ᵢⱼ/Rᵢ)/Cⱼ.
//
// A row's new Rᵢ is known as soon as the row has been summed. While a few rows are in the cache, this pass adds
// G²ᵢⱼ/Rᵢ to the energy of each column, the inner sum; so ΣU² takes no pass of its own. That cannot be where U is not
// made of G (momentum of the gradient), nor where other ranks have a part in Rᵢ: see `tiles.h`.
#pragma once

#include "job.h"
#include "loops.h"

namespace adafactor {

constexpr int64_t IN_CACHE = 96 << 10;  // bytes of the rows that are summed before their energies are

inline int64_t place(int64_t offsets, int64_t i) { return offsets ? *at<int64_t>(offsets, i) : i; }

// Algorithm 4, line 5, for an entry of R, given a mean of G² + ε₁.
inline double new_row(const Job& job, int64_t i, double mean) {
    return job.row ? job.beta2 * *at<float>(job.row, place(job.row_offsets, i)) + job.w2 * mean : 1.0;
}

inline double mean_of_row(const Job& job, double squares) {
    return (squares + double(job.cols / job.period) * job.eps1) / job.n_cols;
}

// Writes some numbers again and again.
inline void repeat(const float* values, int64_t period, float* out, int64_t n) {
    for (int64_t j = 0; j < std::min(period, n); ++j) out[j] = values[j];
    for (int64_t j = period; j < n; ++j) out[j] = out[j - period];
}

// The rows of G in a chunk, and where their sums belong.
template <class G>
struct Summing {
    const Job& job;
    const Scratch& s;
    const Chunk chunk;
    float* const squares = s.squares + chunk.number * job.width();  // of all columns
    float* const energies = s.energies + chunk.number * job.width();

    int64_t line_of(int64_t row, int64_t part) const {
        return (chunk.batch * job.rows + chunk.start + row) * job.parts + part;
    }
    const G* g(int64_t line, int64_t start = 0) const { return at<G>(job.g, line * job.cols + start); }

    void set_row(int64_t i, double sum) const {
        s.row[i] = sum;
        s.row_scale[i] = float(new_row(job, i, mean_of_row(job, sum)));
    }

    // ---- four rows at a time, a quarter of the chunk apart

    void sum_four(int64_t row, int64_t quarter, int64_t part) const {
        const int64_t i = line_of(row, part), apart = quarter * job.parts;
        double sums[4] = {};
        for (int64_t j = 0; j < job.cols; j += WIDTH) {
            const Four t = squares_of_four(g(i, j), g(i + apart, j), g(i + 2 * apart, j), g(i + 3 * apart, j),
                                           squares + part * job.cols + j, std::min(WIDTH, job.cols - j));
            sums[0] += t.a, sums[1] += t.b, sums[2] += t.c, sums[3] += t.d;
        }
        for (int64_t k = 0; k < 4; ++k) set_row(i + k * apart, sums[k]);
    }

    void add_energies_of_four(int64_t row, int64_t quarter, int64_t part) const {
        const int64_t i = line_of(row, part), apart = quarter * job.parts;
        const float* r = s.row_scale + i;
        energies_of_four(g(i), g(i + apart), g(i + 2 * apart), g(i + 3 * apart),
                         {r[0], r[apart], r[2 * apart], r[3 * apart]}, energies + part * job.cols, job.cols);
    }

    void sum_quarters(int64_t quarter) const {
        const int64_t most = std::max<int64_t>(1, IN_CACHE / (4 * job.width() * int64_t(sizeof(G))));
        for (int64_t start = 0; start < quarter; start += most) {
            const int64_t stop = std::min(quarter, start + most);
            for (int64_t row = start; row < stop; ++row)
                for (int64_t part = 0; part < job.parts; ++part) sum_four(row, quarter, part);
            if (job.needs_second_pass) continue;
            for (int64_t k = 0; k < 4; ++k)
                invert_roots(s.row_scale + line_of(start + k * quarter, 0), (stop - start) * job.parts);
            for (int64_t row = start; row < stop; ++row)
                for (int64_t part = 0; part < job.parts; ++part) add_energies_of_four(row, quarter, part);
        }
    }

    // ---- one line at a time

    void sum_one(int64_t line, int64_t part) const {
        double sum = 0;
        for (int64_t j = 0; j < job.cols; j += WIDTH)
            sum += squares_of_one(g(line, j), squares + part * job.cols + j, std::min(WIDTH, job.cols - j));
        set_row(line, sum);
        if (job.needs_second_pass) return;
        invert_roots(s.row_scale + line, 1);
        energies_of_one(g(line), s.row_scale[line], energies + part * job.cols, job.cols);
    }

    // Where entries of R alternate along a line: by way of a tile with a number for each of its own.
    void sum_one_by_number(int64_t line, int64_t part) const {
        const int64_t period = job.period, longest = period * std::clamp<int64_t>(TILE / period, 1, 16);
        const int64_t first = line * period;
        alignas(64) float tile[TILE];
        double sums[TILE];
        fill_with_zeros(tile, longest), fill_with_zeros(sums, period);
        for (int64_t j = 0; j < job.cols; j += longest)
            squares_by_number(g(line, j), tile, squares + part * job.cols + j, std::min(longest, job.cols - j));
        for (int64_t j = 0; j < longest; j += period)
            for (int64_t k = 0; k < period; ++k) sums[k] += tile[j + k];
        for (int64_t k = 0; k < period; ++k) set_row(first + k, sums[k]);
        if (job.needs_second_pass) return;
        invert_roots(s.row_scale + first, period);
        repeat(s.row_scale + first, period, tile, longest);
        for (int64_t j = 0; j < job.cols; j += longest)
            energies_by_number(g(line, j), tile, energies + part * job.cols + j, std::min(longest, job.cols - j));
    }

    void sum_all() const {
        fill_with_zeros(squares, job.width());
        if (!job.needs_second_pass) fill_with_zeros(energies, job.width());
        const int64_t rows = chunk.stop - chunk.start, quarter = job.period == 1 ? rows / 4 : 0;
        sum_quarters(quarter);
        for (int64_t row = 4 * quarter; row < rows; ++row)
            for (int64_t part = 0; part < job.parts; ++part)
                job.period == 1 ? sum_one(line_of(row, part), part) : sum_one_by_number(line_of(row, part), part);
    }
};

inline Average average_of(const Job& job) {
    const bool near_one = job.beta2 >= 0.5;
    return {near_one ? 1.0f : float(job.beta2), near_one ? float(job.w2) : 0.0f, float(job.w2), float(job.eps1)};
}

// ΣG²/V̂ of a chunk of an unfactored tensor, with V̂ as it will be.
template <class G>
double energy_of_chunk(const Job& job, Chunk chunk) {
    const Average average = average_of(job);
    double energy = 0;
    for (int64_t i = chunk.start * TILE; i < std::min(job.cols, chunk.stop * TILE); i += TILE)
        energy += energy_of_unfactored(at<G>(job.g, i), at<float>(job.full, i), average, std::min(TILE, job.cols - i));
    return energy;
}

inline void first_pass(const Job& job, int64_t number, const Scratch& s) {
    const Chunk chunk = chunk_at(job, number);
    s.sums[number] = {};
    with_type(job.g_type, [&](auto g) {
        using G = decltype(g);
        if (job.factored)
            Summing<G>{job, s, chunk}.sum_all();
        else
            s.sums[number].u2 = energy_of_chunk<G>(job, chunk);
    });
}

}  // namespace adafactor
