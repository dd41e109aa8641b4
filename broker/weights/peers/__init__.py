"""Weights from whoever has them: processes of a run serve one another the chunks of versions that they hold.

A reader pulls ranges of chunks over several connections, compares each with its digest in the manifest, and serves
what it has from then on. Where the others are is in the broker, under a lease. The trainer gives each chunk to a few
readers and leaves the rest to them, so that what leaves it does not grow with their number.
"""
