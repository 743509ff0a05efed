"""The parts of `scripts/gpu_check.py`: one run on a GPU that does what the README promises."""
