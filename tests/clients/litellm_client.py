"""litellm: an answer, and a prompt that is too long taken for what it is."""

import sys

import litellm

CALL = {
    "model": "hosted_vllm/hisparsed-reference",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "num_retries": 0,
}
answer = litellm.completion(messages=[{"role": "user", "content": "hi"}], max_tokens=5, **CALL)
assert answer.choices[0].finish_reason in {"stop", "length"}
try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 9_000}], max_tokens=5, **CALL)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt that is too long was not recognised")
