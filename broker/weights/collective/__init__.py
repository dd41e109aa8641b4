"""One broadcast of a version to all generators that are ready for it, over NCCL or, on processors, gloo.

For each version the trainer calls a roll in the broker. Who answers in time takes part; whoever is late, dies, hangs or
receives damaged bytes fetches the version from peers, who have it from the moment it is published. A collective can't
be broken off, so each service's part in it runs in a process of its own, which is killed when it is late: neither the
trainer nor an engine ever waits inside one, and neither shares its memory, or its default process group, with it.
"""
