"""How long a new version of the weights takes to every generator."""
