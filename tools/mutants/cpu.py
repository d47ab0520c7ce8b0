"""Mutations of the compiled library, and of what hands the parameters to it."""

FIRST, BETWEEN, LOOPS = (f"kernels/cpu/src/{name}.h" for name in ("first_pass", "between", "loops"))
TABLE = "kernels/cpu/executor.py"

MUTATIONS = [
    (
        "two lines go uphill",
        LOOPS,
        "round0(multiply_add(old0, decay, -by0(j)), j)",
        "round0(multiply_add(old0, decay, by0(j)), j)",
    ),
    (
        "decay after the update",
        LOOPS,
        "const float now = round(multiply_add(old, decay, -by(j)), j);",
        "const float now = round((old - by(j)) * decay, j);",
    ),
    (
        "eps1 is not added to the rows",
        FIRST,
        "(squares + double(job.cols / job.period) * job.eps1)",
        "squares",
    ),
    ("eps1 is not added to the columns", BETWEEN, "(s.col[j] + double(job.rows) * job.eps1)", "s.col[j]"),
    ("eps2 does not bound RMS(X)", BETWEEN, "larger(job.eps2, job.rms_x)", "job.rms_x"),
    (
        "C of the state is never written",
        BETWEEN,
        "for (int64_t j = 0; job.col && j < job.col_count(); ++j)",
        "for (int64_t j = 0; job.col && j < 0; ++j)",
    ),
    ("C is that of this step alone", BETWEEN, "job.beta2 * old + job.w2 * s.col[j]", "s.col[j]"),
    (
        "mean(R) is that of the first matrix",
        BETWEEN,
        "s.mean_row[first / job.cols * job.period + (j - first) % job.period];",
        "s.mean_row[0];",
    ),
    ("a column's mean is divided by the columns", BETWEEN, "/ job.n_rows;", "/ job.n_cols;"),
    (
        "the columns of the last chunk are left out",
        BETWEEN,
        "for (int64_t i = 0; i < count; ++i) {",
        "for (int64_t i = 0; i < (count > 1 ? count - 1 : 1); ++i) {",
    ),
    ("every fourth line has its neighbour's sum", FIRST, "sums[3] += t.d;", "sums[3] += t.c;"),
    ("clip ignores d", BETWEEN, "larger(1, job.rms_u / job.clip)", "larger(1, job.rms_u)"),
    ("clip inverted", BETWEEN, "larger(1, job.rms_u / job.clip)", "larger(1, job.clip / job.rms_u)"),
    ("ΣU² without 1/C", BETWEEN, "total += energies[j] * factor;", "total += energies[j];"),
    (
        "ΣU² of the ranks is not taken over",
        TABLE,
        'self.jobs["u2"][self._present] = [one.u2 for one in self.sums]',
        "pass",
    ),
    ("a write that torch counts is not noticed", TABLE, 'table["x2_after"][written] = np.nan', "pass"),
    (
        "torch is not told that X was written",
        TABLE,
        "if taken.all():\n            torch.autograd.graph.increment_version(self.writable)",
        "if taken.all():",
    ),
    (
        "RMS(X) is that of the step before",
        BETWEEN,
        "sum_of(job, s, &ChunkSums::x2_after) : NAN",
        "sum_of(job, s, &ChunkSums::x2_before) : NAN",
    ),
    (
        "int8 momentum rounded to nearest",
        LOOPS,
        "const float chance = float(int32_t(words.upper_half(j))) * 0x1p-16f;",
        "const float chance = 0.5f;",
    ),
    (
        "bfloat16 momentum rounded to nearest",
        LOOPS,
        "at_random<Bfloat16>(u[j], words.upper_half(j))",
        "nearest<Bfloat16>(u[j])",
    ),
    (
        "one random word for all of a stretch",
        "kernels/cpu/src/numbers.h",
        "mix((first + uint32_t(j)) ^ salt, second_key)",
        "mix(first ^ salt, second_key)",
    ),
    ("the same random words in every step", TABLE, "keys(root, counts[i] + 1)", "keys(root, 1)"),
    (
        "the random words of a shard are those of the first one",
        "kernels/cpu/src/job.h",
        "const int64_t number = job.origin + batch",
        "const int64_t number = batch",
    ),
    ("Kahan's remainder has the wrong sign", LOOPS, "lost(value, now)", "lost(now, value)"),
    (
        "a gradient that is not finite is taken",
        "kernels/cpu/src/step.cpp",
        "job.taken = job.finite || job.ignores_nonfinite;",
        "job.taken = 1;",
    ),
    (
        "momentum averaged with its weights exchanged",
        LOOPS,
        "multiply_add(weight, u - old, old)",
        "multiply_add(weight, old - u, u)",
    ),
    ("V̂ of a vector without β̂₂", LOOPS, "(keep * v - fade * v)", "v"),
    ("decay by alpha is by rho", BETWEEN, "(job.relative && job.decays_by_alpha ? size : 1)", "1"),
    (
        "maximize is forgotten",
        BETWEEN,
        "(applies_alpha_late ? 1 : job.sign * job.alpha)",
        "(applies_alpha_late ? 1 : job.alpha)",
    ),
    ("steps are not counted", BETWEEN, "    ++*at<float>(job.t);\n", ""),
]
