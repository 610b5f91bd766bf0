"""The command line: run a job, and see what a machine has. It uses public names only."""
