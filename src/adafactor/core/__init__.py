"""The optimizer without its kernels: equations, settings, state, and the order of a step. Imports torch alone."""
