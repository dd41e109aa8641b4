"""What a GPU user asks first, measured by one command on a machine with one GPU or more: ``benchmarks/gpu.sh OUT``."""
