"""The endpoint: an HTTP server with OpenAI's and Anthropic's protocols, through which agents call the policy."""
