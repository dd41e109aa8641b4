"""Each service measured by itself: transport, generator, trainer, control plane, scaling."""
