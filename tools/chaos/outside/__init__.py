"""What a run learns from outside: users' conversations, a teacher in a server of its own; and a generator at fault."""
