"""The ``tidemill doctor`` command: this machine, its GPUs' memory, an inference server."""
