"""The simulated node: vLLM's scheduler and HiSparse in virtual time, no model, modelled speed."""
