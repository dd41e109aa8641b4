"""The engine over HTTP: an SGLang or vLLM server, launched by the generator or running elsewhere."""

TESTED = {"sglang": "0.5.23", "vllm": "0.32.0"}
"""The release of each server that the tests run."""
