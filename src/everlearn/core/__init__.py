"""The contract between methods, data and training loops: methods, batches, tasks, streams and likelihoods."""
