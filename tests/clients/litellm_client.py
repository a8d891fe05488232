"""litellm: an answer, and prompts that are too long taken for what they are, by every API."""

import sys

import litellm

URL, KEY = sys.argv[1:]
NODE = {"api_key": KEY, "num_retries": 0, "max_tokens": 5}
OPENAI = {"model": "hosted_vllm/hisparsed-reference", "api_base": f"{URL}/v1", **NODE}
ANTHROPIC = {"model": "anthropic/hisparsed-reference", "api_base": URL, **NODE}
for api in (OPENAI, ANTHROPIC):
    answer = litellm.completion(messages=[{"role": "user", "content": "hi"}], **api)
    assert answer.choices[0].finish_reason in {"stop", "length"}, api["model"]
    # Beyond the model in tokens, in what its tokens can spell, and in what a body may have.
    for characters in (8_192, 100_000, 3_000_000, 70 * 2**20):
        prompt = [{"role": "user", "content": "x" * characters}]
        try:
            litellm.completion(messages=prompt, **api)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{api['model']}: {characters} characters were taken")
