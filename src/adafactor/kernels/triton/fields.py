"""The columns of the tables that the kernels read and write; the settings of a group are in `rates.py`."""

# ---- tensors: int64, what lasts. P is the outer factored axis in memory, Q the inner one; R lies along P, C along Q
(
    STEP,  # its address
    GROUP,  # row of `numbers`
    N,  # length of P; of an unfactored tensor: its lines
    M,  # length of Q; of an unfactored tensor: all its elements
    X_STRIDE_P,  # strides of X and G along P and Q, in elements
    X_STRIDE_Q,
    G_STRIDE_P,
    G_STRIDE_Q,
    ROW_STRIDE,  # of R in the state
    COL_STRIDE,
    SCALE_STRIDE,  # from a row's scales to the next row's
    COLUMNS,  # of a block of int8
    MATRICES,  # that a block reaches over
    WHOLE_N,  # lengths of P and Q on all ranks together
    WHOLE_M,
    COUNT,  # elements on all ranks together
    SHRINK,  # a float64: a power of two that keeps sums of G² over P or Q in range
    FIRST_UNIT,  # of the first pass
    UNITS,
    PARTS,  # programs that share a row
    FIRST_BLOCK,  # of columns
    BLOCKS,
    FIRST_TILE,  # of the last pass
    TILES,
    FIRST_CHECK,  # of ΣX² of a tile
    CHECKS,
    NUMBER_P,  # what is added to an element's number along P and Q
    NUMBER_Q,
    ROOT1,  # of the random numbers
    ROOT2,
    SWAPPED,  # 1: the paper's rows lie along Q, so that V̂ is divided by the mean of C
    MEAN_GIVEN,  # 1: the ranks find mean(R) together
) = range(32)
TENSOR = 32  # columns of a row

# ---- matrices: int64, what lasts. A stack of matrices has many; an unfactored tensor has one
(
    OF,  # tensor
    X,  # addresses; 0: there is no such thing
    ROW,
    COL,
    FULL,
    MOMENTUM,
    SCALE,  # of an int8 momentum, a number for each block
    COMPENSATION,
    G_OFFSET,  # from the first element of the tensor's gradient
    OWN_UNIT,  # its first unit, and how many
    OWN_UNITS,
    PARTIAL,  # where its column sums begin in the scratch
    NEW_ROW,  # where its new R and C begin among the vectors, and their inverse roots among the inverses
    NEW_COL,
    NUMBER,  # of its first element
) = range(15)
MATRIX = 15

# ---- given: int64, uploaded when it has changed
G_ADDRESS, MUST_MEASURE = range(2)  # 0: no gradient; whether ΣX² must be measured before the step
GIVEN = 2

# ---- notes: float64, what a step finds out about a tensor
(
    W1,  # 1 − β̂₁ₜ
    W2,  # 1 − β̂₂ₜ
    BETA2,  # β̂₂ₜ
    RHO,  # ρₜ
    SHARE,  # of X, that weight decay takes; if it is by αₜ, of X/max(ε₂, RMS(X))
    DECAY,  # of X, that it leaves
    KEY1,  # of the random numbers
    KEY2,
    TAKEN,  # 1: yes; 0: the gradient is not finite; −1: a GradScaler has found an infinity
    ALPHA,  # αₜ, negative to maximise
    X2,  # ΣX² that the step relies on
    U2,  # ΣU² as far as the first pass knows it
    RMS_U,  # for the report, and all that follows
    REPORTED_ALPHA,
    RMS_X,
    REPORTED_BETA2,
    STEPS,
    CLIPPED,
    SKIPPED,
) = range(19)
NOTES = 19

# ---- sums: float64, what a unit of the first pass leaves
ROW_SUM, ENERGY, PROBE = range(3)  # the last one is 0 where G² is finite, else NaN
SUMS = 3
