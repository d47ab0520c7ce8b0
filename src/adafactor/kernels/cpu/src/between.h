// Between the passes: means, R and C, 1/√V̂, and the scalars of Algorithm 4. Vectors, so one thread does it.
#pragma once

#include "last_pass.h"

namespace adafactor {

constexpr double SMALLEST_NORMAL = 1.2e-38;  // of float
constexpr double LARGEST = 3.4028234663852886e38;
constexpr double LOST = 1e-30;  // a mean of squares below which some of them may have been zero in float

inline double sum_of(const Job& job, const Scratch& s, double ChunkSums::* which) {
    double total = 0;
    for (int64_t i = 0; i < chunks_of(job); ++i) total += s.sums[i].*which;
    return total;
}

// ---- after the first pass

// Adds up what the chunks of a batch have found of `n` of its columns.
inline void add_chunks(const float* __restrict chunks, int64_t count, int64_t width, double* __restrict sums,
                       int64_t n) {
    for (int64_t j = 0; j < n; ++j) sums[j] = 0;
    for (int64_t i = 0; i < count; ++i) {
        LOOP
        for (int64_t j = 0; j < n; ++j) sums[j] += chunks[i * width + j];
    }
}

// Sums all again in double: the sum of a row or column can leave float where no square does.
template <class G>
void sum_again(const Job& job, const Scratch& s) {
    fill_with_zeros(s.row, job.row_count());
    fill_with_zeros(s.col, job.col_count());
    for (int64_t line = 0; line < job.lines(); ++line) {
        const G* g = at<G>(job.g, line * job.cols);
        double* col = s.col + (line / job.parts / job.rows * job.parts + line % job.parts) * job.cols;
        for (int64_t j = 0; j < job.cols; ++j) {
            const float a = load(g[j]), square = a * a;
            s.row[line * job.period + j % job.period] += square;
            col[j] += square;
        }
    }
}

// Takes the means of G² + ε₁, and whether they, and with them G², are finite.
inline void take_means(Job& job, const Scratch& s) {
    job.takes_second_pass = job.needs_second_pass;
    job.u2 = sum_of(job, s, &ChunkSums::u2);
    job.finite = std::isfinite(job.u2);
    if (!job.factored) return;
    const int64_t chunks = chunks_per_batch(job), width = job.width();
    for (int64_t batch = 0; batch < job.batch; ++batch)
        add_chunks(s.squares + batch * chunks * width, chunks, width, s.col + batch * width, width);
    const auto are_finite = [&] {
        return std::isfinite(sum_of(s.row, job.row_count()) + sum_of(s.col, job.col_count()));
    };
    job.finite = are_finite();
    if (!job.finite) {
        with_type(job.g_type, [&](auto g) { sum_again<decltype(g)>(job, s); });
        job.finite = are_finite();
        job.takes_second_pass = 1;
    }
    for (int64_t i = 0; i < job.row_count(); ++i) s.row[i] = mean_of_row(job, s.row[i]);
    for (int64_t j = 0; j < job.col_count(); ++j) s.col[j] = (s.col[j] + double(job.rows) * job.eps1) / job.n_rows;
}

// ---- from means to 1/√V̂

// mean(R) of each matrix: of R along the rows or, where the paper's R is along a line, of that.
inline void take_mean_row(const Job& job, const Scratch& s) {
    const bool is_outer = job.row && job.col;
    const double* values = job.swapped ? s.col : s.row;
    const int64_t count = job.swapped ? job.cols / job.period : job.rows;
    const int64_t inner = job.swapped ? job.period : job.parts * job.period;
    for (int64_t i = 0; i < job.matrices(); ++i) {
        double mean = is_outer ? 0 : 1;
        for (int64_t j = 0; is_outer && j < count; ++j) mean += values[(i / inner * count + j) * inner + i % inner];
        s.mean_row[i] = is_outer ? mean / double(count) : mean;
    }
    if (is_outer && job.mean_row)
        std::memcpy(s.mean_row, at<double>(job.mean_row), size_t(job.matrices()) * sizeof(double));
}

// ΣU² of the columns' energies. Where float has lost too much, a second pass will take it: a square below the smallest
// normal number vanishes from an energy, but mean(R)/C may be large.
inline void take_energy(Job& job, const Scratch& s) {
    const int64_t chunks = chunks_per_batch(job), width = job.width();
    double total = 0, most = 0, energies[TILE];
    for (int64_t batch = 0; batch < job.batch; ++batch)
        for (int64_t start = 0; start < width; start += TILE) {
            const int64_t n = std::min(TILE, width - start);
            add_chunks(s.energies + batch * chunks * width + start, chunks, width, energies, n);
            for (int64_t j = 0; j < n; ++j) {
                const int64_t i = batch * width + start + j;
                const double factor = s.mean_row[i / job.cols * job.period + i % job.period] / s.col[i];
                total += energies[j] * factor;
                most += factor;
            }
        }
    job.u2 = total;
    const bool has_lost = double(job.rows) * SMALLEST_NORMAL * most > 1e-6 * total + 1e-12 * job.count;
    job.takes_second_pass = job.finite && (has_lost || !std::isfinite(total));
}

// Algorithm 4, lines 5–7: R and C as they will be, and 1/√V̂.
inline void take_factors(Job& job, const Scratch& s) {
    if (!job.factored) return;
    for (int64_t i = 0; i < job.row_count(); ++i) s.row[i] = new_row(job, i, s.row[i]);
    for (int64_t j = 0; j < job.col_count(); ++j) {
        const double old = job.col ? *at<float>(job.col, place(job.col_offsets, j)) : 0;
        s.col[j] = job.col ? job.beta2 * old + job.w2 * s.col[j] : 1.0;
    }
    take_mean_row(job, s);
    for (int64_t i = 0; i < job.row_count(); ++i) s.row_scale[i] = float(1 / std::sqrt(s.row[i]));
    for (int64_t first = 0; first < job.col_count(); first += job.cols)
        for (int64_t j = first; j < first + job.cols; ++j) {
            const double mean = s.mean_row[first / job.cols * job.period + (j - first) % job.period];
            s.col_scale[j] = float(std::sqrt(mean / s.col[j]));
        }
    if (!job.takes_second_pass) take_energy(job, s);
}

// ---- the scalars

// ΣX². Squares may leave float where RMS(X) does not: then it is summed again in double.
inline void take_x2(Job& job, const Scratch& s) {
    if (!job.measures_x) return;
    job.x2 = reads_x(job) ? sum_of(job, s, &ChunkSums::x2_before) : job.x2_after;
    if (std::isfinite(job.x2) && (job.x2 > LOST * job.count || job.eps2 > 1e-14)) return;
    job.x2 = 0;
    with_type(job.x_type, [&](auto type) {
        const auto* x = at<decltype(type)>(job.x);
        for (int64_t i = 0; i < job.elements(); ++i) job.x2 += double(load(x[i])) * double(load(x[i]));
    });
}

// The nearest float that is no infinity, which would make NaN of a G that is zero.
inline float within_float(double value) { return float(std::clamp(value, -LARGEST, LARGEST)); }

inline double larger(double bound, double value) { return bound > value ? bound : value; }  // a NaN stays one

// Algorithm 4, lines 3 and 9: from RMS(X) and RMS(U) to what U, M and X are multiplied with.
inline void take_scalars(Job& job) {
    job.rms_x = std::sqrt(job.x2 / job.count);
    job.rms_u = std::sqrt(job.u2 / job.count);
    const double size = larger(job.eps2, job.rms_x);
    job.alpha = job.relative ? size * job.rho : job.rho;
    const double divisor = job.clip > 0 ? larger(1, job.rms_u / job.clip) : 1;
    const bool applies_alpha_late = job.momentum && job.momentum_of == OF_DIRECTION;
    job.scale = (applies_alpha_late ? 1 : job.sign * job.alpha) / divisor;
    job.rate = applies_alpha_late ? job.sign * job.alpha : 1;
    job.decay = 1 - job.share * (job.relative && job.decays_by_alpha ? size : 1);
    job.clipped += divisor > 1;
}

// From here on the state is written.
inline void conclude(Job& job, const Scratch& s) {
    take_scalars(job);
    for (int64_t i = 0; job.row && i < job.row_count(); ++i)
        *at<float>(job.row, place(job.row_offsets, i)) = float(s.row[i]);
    for (int64_t j = 0; job.col && j < job.col_count(); ++j)
        *at<float>(job.col, place(job.col_offsets, j)) = float(s.col[j]);
    // α goes to the columns' factors; where it would take one of them out of float, to the rows'.
    const float* const largest = std::max_element(s.col_scale, s.col_scale + job.col_count());
    const bool fits = job.col_count() == 0 || std::fabs(*largest * job.scale) <= LARGEST;
    for (int64_t j = 0; fits && j < job.col_count(); ++j) s.col_scale[j] *= float(job.scale);
    for (int64_t i = 0; !fits && i < job.row_count(); ++i) s.row_scale[i] = within_float(s.row_scale[i] * job.scale);
}

// After the last pass: counts the step, and keeps ΣX² unless somebody wrote to X behind torch's back.
inline void finish(Job& job, const Scratch& s) {
    const bool as_expected = reads_x(job) || sum_of(job, s, &ChunkSums::x2_before) == job.x2_after;
    job.x2_after = as_expected ? sum_of(job, s, &ChunkSums::x2_after) : NAN;
    ++*at<float>(job.t);
    ++job.steps;
    job.beta2_taken = job.beta2;
}

}  // namespace adafactor
