"""Mutations of the Triton kernels, and of what launches them."""

FIRST, BETWEEN, LAST, ELEMENTS, EXECUTOR = (
    f"kernels/triton/{name}.py" for name in ("first_pass", "between", "last_pass", "elements", "executor")
)

MUTATIONS = [
    ("the step goes uphill", LAST, "exact = old * keep - u", "exact = old * keep + u"),
    ("decay after the update", LAST, "exact = old * keep - u", "exact = (old - u) * keep"),
    ("eps1 is not added to the rows", FIRST, "tl.sum(sum_of_row, 1) / m + eps1", "tl.sum(sum_of_row, 1) / m"),
    ("eps1 is not added to the columns", BETWEEN, "(square + eps1 * n) / whole_n", "square / whole_n"),
    ("eps2 does not bound RMS(X)", BETWEEN, "tl.where(rms_x < eps2, eps2, rms_x)", "rms_x"),
    (
        "C of the state is never written",
        LAST,
        "c = keep_factor(own_col_ptr, new_col_ptr + matrix * m, cols, m, first == 0) * scale",
        "c = keep_factor(own_col_ptr, new_col_ptr + matrix * m, cols, m, first < 0) * scale",
    ),
    ("C is that of this step alone", BETWEEN, "mean, tl.load(fields_ptr + f.W2))", "mean, 1.0)"),
    ("R is that of this step alone", FIRST, "new = average(old, mean, w2)", "new = average(old, mean, 1.0)"),
    ("a column's mean is divided by the columns", BETWEEN, "(square + eps1 * n) / whole_n", "(square + eps1 * n) / m"),
    (
        "the columns of the last unit are left out",
        BETWEEN,
        "(unit < units)[:, None]",
        "(unit < tl.maximum(units - 1, 1))[:, None]",
    ),
    ("clip inverted", BETWEEN, "tl.where(rms_u / clip < 1.0,", "tl.where(rms_u / clip > 1.0,"),
    ("ΣU² without 1/C", BETWEEN, "ratio = ratio / new.to(tl.float64)", "ratio = ratio * 1.0"),
    ("ΣU² of the ranks is not taken over", EXECUTOR, "                self._note_sums()", "                pass"),
    ("a write that torch counts is not noticed", EXECUTOR, "if written is not None:", "if False:"),
    (
        "torch is not told that X was written",
        EXECUTOR,
        "torch.autograd.graph.increment_version([plan.x for plan, _ in self._present()])",
        "pass",
    ),
    (
        "RMS(X) is that of the step before",
        LAST,
        "RANDOM)\n        x2 = tl.fma(value, value, x2)",
        "RANDOM)\n        x2 = tl.fma(value + u, value + u, x2)",
    ),
    (
        "int8 momentum rounded to nearest",
        ELEMENTS,
        "chance = ((words >> 16 << 7) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0",
        "chance = 0.5",
    ),
    ("bfloat16 momentum rounded to nearest", LAST, "to_bfloat16(new, words >> 16)", "narrow(new, tl.bfloat16)"),
    (
        "one random word for all of a line",
        LAST,
        "ahead = (tl.arange(0, LINE) * number_strides.col)",
        "ahead = (tl.arange(0, LINE) * 0)",
    ),
    (
        "the same random words in every step",
        LAST,
        "t, zero = tl.load(step_ptr).to(tl.int64)",
        "t, zero = (tl.load(step_ptr) * 0).to(tl.int64)",
    ),
    (
        "the random words of a shard are those of the first one",
        LAST,
        "start = number + matrix * number_strides.stack",
        "start = matrix * number_strides.stack",
    ),
    ("Kahan's remainder has the wrong sign", LAST, "exact - value, 0.0)", "value - exact, 0.0)"),
    ("a gradient that is not finite is taken", BETWEEN, "if IGNORES:", "if True:"),
    ("momentum averaged with its weights exchanged", LAST, "new = old + (u - old) * w1", "new = u + (old - u) * w1"),
    ("averages without 1 − β̂₂", ELEMENTS, "return old - old * weight + new * weight", "return old + new * weight"),
    ("decay by alpha is by rho", BETWEEN, "(size if BY_ALPHA else 1.0)", "1.0"),
    (
        "maximize is forgotten",
        BETWEEN,
        "(1.0 if AFTER else SIGN * alpha) / divisor",
        "(1.0 if AFTER else alpha) / divisor",
    ),
    ("steps are not counted", BETWEEN, "tl.store(step_ptr, t + 1.0)", "tl.store(step_ptr, t)"),
]
