"""Run the command line as `python -m nxrt`."""

from nxrt.cli.app import main

main()
