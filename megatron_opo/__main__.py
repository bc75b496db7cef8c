"""The command as a program. Without the packages that it is made of it says so in one line."""

import sys


def main() -> None:
    """Run the command; exit code 2 if a package that even `--help` needs is not installed."""
    try:
        from megatron_opo.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "megatron_opo":
            raise
        print(
            f"error: Python cannot find {error.name}, which megatron-opo needs: pip installs the "
            "command alone. Run `make setup` in a checkout, or install what requirements/cpu.txt "
            "(without a GPU) or requirements.txt (cluster) name there",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
