"""The endpoint: an HTTP server in the protocols of OpenAI and Anthropic, where agents ask the policy."""
