"""Parsers: what the policy sampled, as text, reasoning and tool calls."""
