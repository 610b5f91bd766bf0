"""Planning: what a model's states, workspaces and graph will need, before anything is allocated.

It is arithmetic over geometries and budgets and touches no device; `nxrt.cli.plan` shows it.
"""
