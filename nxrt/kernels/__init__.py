"""Kernels: the plug-in interface, the registry, and one folder for each operator."""
