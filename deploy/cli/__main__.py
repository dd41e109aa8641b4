"""``python -m deploy.cli``, the same as ``tidemill``."""

from deploy.cli.app import main

main()
