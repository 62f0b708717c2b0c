"""The mathematics of PPO: tensors in, tensors out; no models, files, configuration or global state."""
