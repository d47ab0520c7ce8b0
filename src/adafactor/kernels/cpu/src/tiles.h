// Stretches of U, formed in a tile that stays in the first-level cache: where a momentum comes between G and X, where V̂
// is not factored, where entries of R alternate along a line. And the second pass over G, which takes ΣU² of them.
#pragma once

#include "first_pass.h"

namespace adafactor {

// What forms U. Only in the last pass are V̂ and the momentum written.
template <class G>
struct Tiles {
    const Job& job;
    const Scratch& s;
    const bool writes;
    const Average average = average_of(job);
    int64_t line_of_rows = -1;     // the line whose scales are in `rows`
    alignas(64) float u[TILE];     // the tile
    alignas(64) float rows[TILE];  // where entries of R alternate along a line: 1/√R of each number
    alignas(64) float v[TILE];     // V̂, where it is not written to the state

    // What X moves by, but for a rate.
    void form(Stretch part) {
        const G* g = at<G>(job.g, part.i);
        if (job.momentum && job.momentum_of == OF_GRADIENT) {
            load_tile(g, u, part.n);
            average_momentum(part);
            return form_of(part, u);
        }
        form_of(part, g);
        if (job.momentum && writes) average_momentum(part);
    }

    // U of G or of its momentum.
    template <class M>
    void form_of(Stretch part, const M* m) {
        const float* col = s.col_scale + part.col;
        if (!job.factored) {
            float* state = at<float>(job.full, part.i);
            divide_tile(at<G>(job.g, part.i), m, state, writes ? state : v, average, writes ? float(job.scale) : 1.0f,
                        u, part.n);
        } else if (job.period == 1) {
            fill_tile(Direct<M>{m, s.row_scale[part.line], col}, u, part.n);
        } else {
            fill_tile(ByNumber<M>{m, rows_of(part), col}, u, part.n);
        }
    }

    // 1/√R of each number of a stretch, which begins with the first of the entries.
    const float* rows_of(Stretch part) {
        if (line_of_rows != part.line) {
            line_of_rows = part.line;
            repeat(s.row_scale + part.line * job.period, job.period, rows, std::min(job.cols, longest_stretch(job)));
        }
        return rows;
    }

    void average_momentum(Stretch part) {
        if (job.w1 < 0.5)
            average_momentum(part, Blend<false>{float(job.w1)});
        else
            average_momentum(part, Blend<true>{float(1 - job.w1)});
    }

    template <class Average>
    void average_momentum(Stretch part, Average blend) {
        if (job.momentum == IN_INT8) return average_in_blocks(part, blend);
        if (job.momentum == IN_FLOAT32) {
            float* m = at<float>(job.m, part.i);
            return average_in(m, writes ? m : u, u, blend, part.n);
        }
        Bfloat16* m = at<Bfloat16>(job.m, part.i);
        writes ? average_in_at_random(m, u, blend, words_of(job, part), part.n) : average_in(m, u, blend, part.n);
    }

    template <class Average>
    void average_in_blocks(Stretch part, Average blend) {
        int8_t* m = at<int8_t>(job.m, part.i);
        float* scale = at<float>(job.m_scales, part.line * divided_up(job.cols, job.block) + part.start / job.block);
        Words words = words_of(job, part);
        for (int64_t j = 0; j < part.n; j += job.block, ++scale, words.first += uint32_t(job.block)) {
            const int64_t n = std::min(job.block, part.n - j);
            average_in(m + j, *scale, u + j, blend, n);
            if (!writes) continue;
            const float largest = largest_of(u + j, n), inverse = largest > 0 ? MOST / largest : 0.0f;
            *scale = largest / MOST;
            encode_at_random(u + j, m + j, inverse, words, n);
        }
    }
};

// ΣU² of a chunk, in double: with a momentum of the gradient, squares may leave float where V̂ does not.
template <class G>
double energy_in_tiles(const Job& job, Chunk chunk, const Scratch& s) {
    Tiles<G> tiles = {job, s, false};
    double energy = 0;
    const auto one = [&](Stretch part) {
        for (int64_t j = 0; j < part.n; j += TILE) {  // where X moves directly, stretches are longer than a tile
            const Stretch piece = {part.line,  part.start + j, std::min(TILE, part.n - j),
                                   part.i + j, part.col + j,   part.number + j};
            tiles.form(piece);
            energy += sum_of_squares(tiles.u, piece.n);
        }
    };
    for_each_stretch(job, chunk, one, [&](Stretch a, Stretch b) { one(a), one(b); });
    return energy;
}

inline void second_pass(const Job& job, int64_t number, const Scratch& s) {
    with_type(job.g_type,
              [&](auto g) { s.sums[number].u2 = energy_in_tiles<decltype(g)>(job, chunk_at(job, number), s); });
}

}  // namespace adafactor
