"""The policy: model, packed attention, LoRA, and its weights as Hugging Face files."""
