"""Training without a broker: supervised fine-tuning, preference losses."""
