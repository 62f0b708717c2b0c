"""Where a run's batches come from: the current policy, a sampler ahead of training, or a loop by hand."""
