"""From a source to code that a driver can load: headers, NVRTC, and a cache that may never hurt.

Needs no driver and no device.
"""
