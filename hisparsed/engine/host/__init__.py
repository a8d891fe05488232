"""Host memory of one engine: pinned once as the HiSparse pool, lent to the offload pool."""
