"""How large the weights of the lab's runs have become, which relative steps are multiplied by; docs/reproduction.md.

python -m studies.weight_growth small-B-warm-x6-s0 small-O-cold-x3-s0

The runs must have been made on this machine: weights are not kept in the records.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lab.corpus import cache_folder


def rms(weights: dict[str, Tensor]) -> tuple[float, float]:
    """RMS of the embedding, and the mean of the other matrices'."""
    found = {name: w.square().mean().sqrt().item() for name, w in weights.items() if w.ndim == 2}
    embeddings = [value for name, value in found.items() if "embed" in name]
    others = [value for name, value in found.items() if "embed" not in name]
    return sum(embeddings) / len(embeddings), sum(others) / len(others)


def main(names: list[str]) -> int:
    """Print a line of the table for each run."""
    print("| run | RMS of the embedding | mean RMS of the other matrices |\n|---|---|---|")
    for name in names:
        path = Path(cache_folder()) / "runs" / name / "weights.safetensors"
        if not path.exists():
            print(f"There are no weights of {name} here: `python -m lab reproduce` makes them.", file=sys.stderr)
            return 1
        embedding, others = rms(load_file(path))
        print(f"| {name} | {embedding:.2f} | {others:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
