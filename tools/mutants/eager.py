"""Mutations of the algorithm in eager PyTorch, and of what all backends share."""

MUTATIONS = [
    (
        "the step goes uphill",
        "core/update.py",
        "x.sub_(change, alpha=self.after)",
        "x.add_(change, alpha=self.after)",
    ),
    ("eps1 is not added", "algorithm.py", "(total + u.g.shape[axis] * u.s.eps[0])", "total"),
    ("eps2 does not bound RMS(X)", "core/equations.py", "_at_least(eps2, rms_parameter) * rho", "rms_parameter * rho"),
    (
        "R and C of the state are those of this step alone",
        "kernels/eager/executor.py",
        "[new for u in taken for new in (u.R, u.C)",
        "[new for u in taken for new in (u.rows, u.cols)",
    ),
    (
        "U is divided by the C of the step before",
        "algorithm.py",
        "u.C.rsqrt()]  #",
        "(u.C if u.col is None or not u.rates.beta2 else u.col).rsqrt()]  #",
    ),
    ("mean(R) along the wrong axis", "algorithm.py", "u.R.mean(u.axes[0],", "u.R.mean(u.axes[1],"),
    ("every mean is divided by n", "algorithm.py", "/ u.parameter.shape[axis]", "/ u.parameter.shape[n]"),
    (
        "ΣU² of the ranks is not added up",
        "distributed/reductions.py",
        "one.u2, one.x2 = u2, x2",
        "one.x2 = x2",
    ),
    (
        "mean(R) is that of the rank's own rows",
        "algorithm.py",
        "if u.mean_row is None else u.mean_row",
        "if True else u.mean_row",
    ),
    ("clip inverted", "core/equations.py", "_at_least(1.0, rms_update / d)", "_at_least(1.0, d / rms_update)"),
    ("β̂₂ is that of the next step", "core/equations.py", "weight = t**-c", "weight = (t + 1) ** -c"),
    ("the bias correction is off by one", "core/equations.py", "/ (1 - beta**t)", "/ (1 - beta ** (t + 1))"),
    ("ρ is the larger of the two", "core/equations.py", "else min(lr, t**-0.5)", "else max(lr, t**-0.5)"),
    ("RMS(X) is that of G", "algorithm.py", "norm(u.x[at] for at in", "norm(u.g[at] for at in"),
    (
        "decay after the update",
        "core/update.py",
        """        if decays:
            x.mul_(self.keep)
        if isinstance(self.after, Tensor):
            x.addcmul_(change, self.after, value=-1)
        else:
            x.sub_(change, alpha=self.after)
""",
        """        if isinstance(self.after, Tensor):
            x.addcmul_(change, self.after, value=-1)
        else:
            x.sub_(change, alpha=self.after)
        if decays:
            x.mul_(self.keep)
""",
    ),
    (
        "decay by alpha is by rho",
        "algorithm.py",
        'decay = s.weight_decay * alpha if s.weight_decay_by == "alpha" else rates.decay',
        "decay = rates.decay",
    ),
    ("maximize is forgotten", "algorithm.py", "rate = -alpha if s.maximize else alpha", "rate = alpha"),
    (
        "mask forgotten",
        "core/update.py",
        "return t if self.skipped is None else t.masked_fill_(self.skipped, 0)",
        "return t",
    ),
    (
        "an infinite G² is taken for a number",
        "kernels/eager/executor.py",
        "flags = torch.stack(largest) < inf",
        "flags = torch.stack(largest) <= inf",
    ),
    (
        "a skipped step counts",
        "kernels/eager/executor.py",
        "u.parameter.metrics.skipped += u.finite is False",
        "u.parameter.state['step'].add_(int(u.finite is False))",
    ),
    (
        "momentum averaged with its weights exchanged",
        "core/update.py",
        "return old.lerp_(new, weight) if write else old.lerp(new, weight)",
        "return old.lerp_(new, 1 - weight) if write else old.lerp(new, 1 - weight)",
    ),
    (
        "momentum rounded to nearest",
        "core/update.py",
        "self.random_words(at, m), self.skipped",
        "torch.full_like(m, 2**31, dtype=torch.int64), self.skipped",
    ),
    ("int8 scale of 128 units", "core/momentum.py", "largest / MOST\n", "largest / (MOST + 1)\n"),
    (
        "the random words of a shard are those of the first one",
        "core/update.py",
        "p.offset or (0,) * like.dim()",
        "(0,) * like.dim()",
    ),
    (
        "random words of the wrong element",
        "core/rounding.py",
        "* prod(whole[axis + 1 :])",
        "* prod(whole[axis + 2 :])",
    ),
    (
        "the same random words in every step",
        "core/rounding.py",
        "return mix(t ^ roots[0]), mix(t ^ roots[1])",
        "return mix(roots[0]), mix(roots[1])",
    ),
    (
        "Kahan's remainder is not given back",
        "core/rounding.py",
        "return value if compensation is None else value.add_(remainder(compensation, value))",
        "return value",
    ),
    (
        "an edited weight is not noticed",
        "core/bucket.py",
        "        if list(map(_version, self.counted)) == self.versions:\n            return None\n        before",
        "        if self.versions:\n            return None\n        before",
    ),
]
