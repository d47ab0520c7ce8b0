"""Whether the kernels compute the right thing on this machine's GPU, and how fast: `adafactor check`."""
