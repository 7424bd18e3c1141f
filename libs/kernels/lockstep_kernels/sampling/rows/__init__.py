"""The kernels of `sampling.sample_rows`; its definition is `sampling.reference.sample_rows`."""
