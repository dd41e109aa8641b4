"""Broadcasts of a version to all generators that are ready for it, over NCCL or, on CPUs, gloo.

For each version the trainer calls a roll in the broker. Generators that answer in time take part. One that is late,
dies, hangs or receives damaged bytes fetches the version from peers, which have it as soon as it is published. A
collective can't be cancelled, so each service takes part through a separate process, which is killed when it is late.
Neither the trainer nor an engine ever waits inside a collective, or shares memory or a process group with that process.
"""
