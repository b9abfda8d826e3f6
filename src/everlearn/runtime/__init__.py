"""Machine-level services: files, hashes, randomness, processes and distributed training."""
