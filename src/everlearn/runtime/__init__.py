"""What every program needs of its machine: files, hashes, randomness, processes, distributed training."""
