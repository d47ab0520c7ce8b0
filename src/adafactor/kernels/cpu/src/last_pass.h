// Last pass, over G and X: the step itself.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace adafactor {

alignas(64) inline constexpr float ZEROS[WIDTH] = {};

// What steps the stretches of a chunk; or, as if the step had length zero, copies of them: then only their sums count.
template <class X, class G>
struct Stepping {
    const Job& job;
    const Scratch& s;
    const bool measures;
    Tiles<G> tiles = {job, s, true};
    const float decay = float(job.decay);
    double x2_before = 0, x2_after = 0;
    X copies[3][WIDTH];

    X* x(Stretch part, int which = 0) {
        X* const x = at<X>(job.x, part.i);
        return measures ? static_cast<X*>(std::memcpy(copies[which], x, size_t(part.n) * sizeof(X))) : x;
    }

    Direct<G> move(Stretch part) const {
        if (measures) return {reinterpret_cast<const G*>(ZEROS), 0, ZEROS};
        return {at<G>(job.g, part.i), s.row_scale[part.line], s.col_scale + part.col};
    }

    void add(Squares x2) {
        x2_before += x2.before;
        x2_after += x2.after;
    }

    // Calls step(function), where the function gives for a stretch how X is rounded.
    template <class Step>
    void with_rounding(const Step& step) {
        if constexpr (!std::is_same_v<X, float>)
            if (job.rounding == STOCHASTIC) return step([&](Stretch part) { return AtRandom<X>{words_of(job, part)}; });
        step([](Stretch) { return Nearest<X>(); });
    }

    ByNumber<G> move_by_number(Stretch part) {
        if (measures) return {reinterpret_cast<const G*>(ZEROS), ZEROS, ZEROS};
        return {at<G>(job.g, part.i), tiles.rows_of(part), s.col_scale + part.col};
    }

    void step_directly(Chunk chunk) {
        if constexpr (!std::is_same_v<X, Float16> && !std::is_same_v<G, Float16>)
            with_rounding([&](auto rounding) {
                const auto one = [&](Stretch a) {
                    add(job.period == 1 ? descend(x(a), move(a), rounding(a), decay, a.n)
                                        : descend(x(a), move_by_number(a), rounding(a), decay, a.n));
                };
                const auto two = [&](Stretch a, Stretch b) {
                    add(descend_two(x(a), x(b, 1), move(a), move(b), rounding(a), rounding(b), decay, a.n));
                };
                for_each_stretch(job, chunk, one, two);
            });
    }

    void step_in_tiles(Chunk chunk) {
        const auto one = [&](Stretch part) {
            if (!measures) tiles.form(part);
            step_by_tile(part, {measures ? ZEROS : tiles.u, float(job.rate)});
        };
        for_each_stretch(job, chunk, one, [](Stretch, Stretch) {});
    }

    void step_by_tile(Stretch part, FromTile by) {
        if constexpr (!std::is_same_v<X, float>)
            if (job.rounding == KAHAN) {
                if (measures) fill_with_zeros(copies[2], part.n);
                X* const kept = measures ? copies[2] : at<X>(job.compensation, part.i);
                return add(descend_compensated(x(part), kept, by, decay, part.n));
            }
        with_rounding([&](auto rounding) { add(descend(x(part), by, rounding(part), decay, part.n)); });
    }

    void run(int64_t number) {
        const Chunk chunk = chunk_at(job, number);
        is_direct(job) ? step_directly(chunk) : step_in_tiles(chunk);
        s.sums[number].x2_before = x2_before;
        s.sums[number].x2_after = x2_after;
    }
};

inline void run_stepping(const Job& job, int64_t number, const Scratch& s, bool measures) {
    with_type(job.x_type, [&](auto x) {
        with_type(job.g_type, [&](auto g) { Stepping<decltype(x), decltype(g)>{job, s, measures}.run(number); });
    });
}

inline void last_pass(const Job& job, int64_t number, const Scratch& s) { run_stepping(job, number, s, false); }

// Whether ΣX² must be read, as the last step has left none.
inline bool reads_x(const Job& job) { return job.measures_x && !std::isfinite(job.x2_after); }

// ΣX² of a chunk to the bit as the last pass will find it.
inline void measure(const Job& job, int64_t number, const Scratch& s) { run_stepping(job, number, s, true); }

}  // namespace adafactor
