"""What crosses a process boundary: messages, their codec, the configuration.

Imports nothing of ours and neither torch nor vllm, so that a control or feeder
process starts in well under a second.
"""
