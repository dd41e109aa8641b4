"""Configurations of other systems, converted: TRL's GRPOConfig and verl's PPO trainer.

Promises: what comes out is a configuration that `tidemill doctor` accepts or says in one line what it still lacks;
every setting of the file that has no counterpart is named with the reason, and none is left out in silence.
"""
