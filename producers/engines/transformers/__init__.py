"""The engine on Hugging Face transformers: any model, no GPU needed."""
