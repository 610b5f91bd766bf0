"""Execution providers: each puts a device, its memory and a table of kernels together."""
