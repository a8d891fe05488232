"""Which vLLM hisparsed runs on: names it touches, how versions differ, and what it refuses."""
