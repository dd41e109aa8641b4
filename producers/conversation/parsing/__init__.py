"""Parsers: sampled tokens as text, reasoning and tool calls."""
