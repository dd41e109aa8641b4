"""From messages and text to token ids."""
