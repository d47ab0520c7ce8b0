"""The paper's experiments on real English-German translation; start with `python -m lab --help`."""
