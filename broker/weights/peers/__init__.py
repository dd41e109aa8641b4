"""Weights from peers: the processes of a run serve each other the chunks of versions that they have.

A reader fetches ranges of chunks over several connections, compares each with its digest in the manifest, and serves it
at once. The broker has the peers' addresses, under a lease. The trainer sends each chunk to a few readers only, which
send it to the others, so that its traffic does not grow with their number.
"""
