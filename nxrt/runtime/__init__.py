"""The CUDA driver, and nothing else: compile, load, launch, allocate, capture, replay.

No budgets, no operators, no graphs of nodes. What it allocates it is told to; what it launches it
is handed.
"""
