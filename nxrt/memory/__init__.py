"""Memory policy: budgets, leases, the governor that hands them out, and charged allocation.

It is arithmetic over sizes and knows no CUDA; `nxrt.runtime` does what is decided here.
"""
