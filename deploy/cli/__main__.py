"""``python -m deploy.cli``: services are started like this. ``tidemill`` calls the same function."""

from deploy.services.process_end import EndAtOnce


def main() -> None:
    """Run the command line, and end without taking apart what was imported."""
    # Before all others that want something done at the end: it has to be the last.
    ending = EndAtOnce()
    from deploy.cli.app import main as run_command

    with ending:
        run_command()


if __name__ == "__main__":
    main()
