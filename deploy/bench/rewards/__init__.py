"""The parts of ``tidemill bench rewards``: a judge that fails at times, and a reward model in batches."""
