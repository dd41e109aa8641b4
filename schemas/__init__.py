"""Messages, their codec and the configuration: all that crosses a process boundary.

This package imports no other of ours, and neither torch nor vllm, so that a control or feeder process starts in well
under a second.
"""
