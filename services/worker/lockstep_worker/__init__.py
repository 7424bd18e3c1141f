"""Runs the steps of one GPU (or CPU): rows, KV cache, model, sampling."""
