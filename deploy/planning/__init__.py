"""How GPUs are best shared between generators and trainer, by a simulation of the flow of prompt groups."""
