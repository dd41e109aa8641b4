"""The RL maths: losses, advantages, aggregation, KL and rejection."""
