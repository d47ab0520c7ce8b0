"""All settings that a plan compares."""

from __future__ import annotations

from adafactor.planning.ours import ours
from adafactor.planning.peers import (
    adamw_8bit_keeps,
    adamw_8bit_shares,
    adamw_holds,
    adamw_keeps,
    mixed_holds,
    nothing_held,
    torch_holds,
    torch_keeps,
    transformers_holds,
    transformers_keeps,
)
from adafactor.planning.setting import FLOAT, SHORT, Setting

RAISES = "it raises on sharded matrices"

SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("adamw-float32", "AdamW, float32", FLOAT, adamw_keeps(FLOAT), adamw_holds(FLOAT)),
        Setting("adamw-mixed", "AdamW, mixed precision", SHORT, adamw_keeps(FLOAT), mixed_holds, master=True),
        Setting("adamw-bfloat16", "AdamW, bfloat16", SHORT, adamw_keeps(SHORT), adamw_holds(SHORT)),
        Setting("adamw-8bit", "AdamW 8-bit, float32", FLOAT, adamw_8bit_keeps, nothing_held, shares=adamw_8bit_shares),
        Setting(
            "adamw-8bit-bfloat16",
            "AdamW 8-bit, bfloat16",
            SHORT,
            adamw_8bit_keeps,
            nothing_held,
            shares=adamw_8bit_shares,
        ),
        Setting(
            "torch-float32",
            "torch.optim.Adafactor, float32",
            FLOAT,
            torch_keeps(FLOAT),
            torch_holds(FLOAT),
            unsharded=RAISES,
        ),
        Setting(
            "torch-bfloat16",
            "torch.optim.Adafactor, bfloat16",
            SHORT,
            torch_keeps(SHORT),
            torch_holds(SHORT),
            unsharded=RAISES,
        ),
        Setting(
            "transformers-float32",
            "transformers' Adafactor, float32",
            FLOAT,
            transformers_keeps,
            transformers_holds(FLOAT),
            unsharded=RAISES,
        ),
        Setting(
            "transformers-bfloat16",
            "transformers' Adafactor, bfloat16",
            SHORT,
            transformers_keeps,
            transformers_holds(SHORT),
            unsharded=RAISES,
        ),
        ours("adafactor-float32", "adafactor, float32", FLOAT),
        ours("adafactor-float32-momentum", "adafactor, float32, momentum", FLOAT, momentum=True),
        ours("adafactor-bfloat16", "adafactor, bfloat16", SHORT),
        ours("adafactor-stochastic", "adafactor, bfloat16, stochastic", SHORT, rounding="stochastic"),
        ours("adafactor-stochastic-momentum", "adafactor, bfloat16, stochastic, momentum", SHORT, True, "stochastic"),
        ours("adafactor-kahan", "adafactor, bfloat16, kahan", SHORT, rounding="kahan"),
        ours("adafactor-backward", "adafactor, bfloat16, stochastic, in backward", SHORT, rounding="stochastic"),
    )
}
