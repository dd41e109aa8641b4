"""The reward ``code``: programs that the policy wrote, run on the cases of their task in the sandbox."""
