"""The scalars of a parameter, which lie on the device so that the host need not wait: float64, a row of a table."""

from triton.language import constexpr

(
    BETA2, W1, W2, RHO, DECAY,  # of step t, as `Settings.rates` has them
    ROOT1, ROOT2,  # of the random words
    TAKEN, SCALE, KEEP,  # whether the step is taken, what U is multiplied by, what weight decay leaves of X
    ALPHA, RMS_X, RMS_U, LAST_BETA2, STEPS, CLIPPED, SKIPPED,  # for `report()`, of the last step that was taken
    FINITE, U2, X2,  # of a shard, as all ranks have completed them
) = map(constexpr, range(20))  # fmt: skip
FIELDS = 20
ROW_SUM, PROBE = constexpr(0), constexpr(1)  # of a unit of rows: ΣR, and a sum that is finite if its G² is
SUMS = constexpr(2)
