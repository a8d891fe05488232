"""vLLM inside hisparsed: launch, plugin, host ledger, scheduler, telemetry; one folder a node."""
