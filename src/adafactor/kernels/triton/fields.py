"""The columns of the tables that the kernels read and write. Every name is a `tl.constexpr`, so kernels can use it."""

from __future__ import annotations

from triton.language import constexpr


def _columns(number: int) -> tuple[constexpr, ...]:
    return tuple(constexpr(i) for i in range(number))


# ---- tensors: int64, what lasts. P is the outer factored axis in memory, Q the inner one; R lies along P, C along Q
(
    X,  # addresses
    ROW,
    COL,
    FULL,
    MOMENTUM,
    COMPENSATION,
    STEP,
    GROUP,  # row of `numbers`
    N,  # length of P; of a tensor that is kept whole: its elements in lines of LINE
    M,  # length of Q; of a tensor that is kept whole: all its elements
    XP,  # strides of X along P and Q, in elements
    XQ,
    GP,
    GQ,
    ROW_STRIDE,  # of R in the state
    COL_STRIDE,
    WHOLE_N,  # lengths of P and Q on all ranks together
    WHOLE_M,
    COUNT,  # elements on all ranks together
    SHRINK,  # a float64: a power of two that keeps sums of G² over P or Q in range
    FIRST_UNIT,  # of the first walk
    UNITS,
    FIRST_BLOCK,  # of columns
    BLOCKS,
    FIRST_PIECE,  # of the last walk
    PIECES,
    NUMBER_P,  # what is added to an element's number along P and Q
    NUMBER_Q,
    ROOT1,  # of the random numbers
    ROOT2,
    SWAPPED,  # 1: the paper's rows lie along Q, so that V̂ is divided by the mean of C
) = _columns(31)
TENSOR = constexpr(32)  # columns of a row

# ---- matrices: int64, what lasts. A stack of matrices has many; a tensor that is kept whole has one
(
    OF,  # tensor
    X_OFFSET,
    G_OFFSET,
    ROW_OFFSET,
    COL_OFFSET,
    OWN_UNIT,  # its first unit, and how many
    OWN_UNITS,
    PARTIAL,  # where its column sums begin in the scratch
    NEW_ROW,  # where its new R and C begin among the vectors
    NEW_COL,
    NUMBER,  # of its first element
) = _columns(11)
MATRIX = constexpr(12)

# ---- given: int64, uploaded when it has changed
G_ADDRESS, MUST_MEASURE = _columns(2)  # 0: no gradient; whether ΣX² must be measured before the step
GIVEN = constexpr(2)

# ---- numbers: float64, the settings of a group, uploaded when they have changed
(
    LR,
    DECAYS,  # 1: ρₜ = min(lr, 1/√t)
    RELATIVE,
    BETA1,
    OF_GRADIENT,
    BETA2,  # negative: 1 − t^−c
    RATE,  # c
    CLIP,  # 0: none
    EPS1,
    EPS2,
    WEIGHT_DECAY,
    SIGN,
    IGNORE,
) = _columns(13)
NUMBERS = constexpr(16)

# ---- notes: float64, what a step finds out about a tensor
(
    TAKEN,  # 1: yes; 0: the gradient is not finite; −1: a GradScaler has found an infinity
    ALPHA,  # αₜ, negative to maximise
    DECAY,  # 1 − ρₜ·λ
    W1,  # 1 − β̂₁ₜ
    W2,  # 1 − β̂₂ₜ
    BETA2_NOW,  # β̂₂ₜ
    X2,  # ΣX² that the step relies on
    U2,  # ΣU² as far as the first walk knows it
    KEY1,
    KEY2,
    TURN,  # which of the two columns of sums of X² the step relies on; the last walk leaves its own in the other
    TURNED,  # 1: it has done so
    STALE,  # 1: X is not what the last step left
    NOTED_RMS_U,  # for the report
    NOTED_ALPHA,
    NOTED_RMS_X,
    NOTED_BETA2,
    STEPS,
    CLIPPED,
    SKIPPED,
) = _columns(20)
NOTES = constexpr(20)

# ---- rates: float64, 1 − β̂₂ₜ, β̂₂ₜ and 1 − β̂₁ₜ for two values of t, an even and an odd one
RATE_T, RATE_W2, RATE_BETA2, RATE_W1 = _columns(4)
RATES = constexpr(8)  # two of them
HALF = constexpr(4)

# ---- sums: float64, what a unit of the first walk leaves
ROW_SUM, ENERGY, PROBE = _columns(3)  # the last one is 0 where G² is finite, else NaN
SUMS = constexpr(3)

# ---- squares: ΣX² of a piece of the last walk, as steps have left it in turns
SQUARES = constexpr(2)

LINE = constexpr(512)  # elements of a line of a tensor that is kept whole
X_UNIT = constexpr(2.0**-30)  # X is squared in these units: neither 1e27 nor 1e-9 leaves float32
